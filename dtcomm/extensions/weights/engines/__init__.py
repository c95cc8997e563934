"""Adapters to inference engines and trainers: one module each. None of them imports its engine before it is used.

Engines take whole tensors by name. `Sender` publishes those of a trainer, `Receiver` keeps them in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtcomm.extensions.weights.courier import Publisher, Subscriber
from dtcomm.extensions.weights.files import Index
from dtcomm.extensions.weights.reshard import published_tensors
from dtcomm.extensions.weights.store import open_store


class Sender:
    """Publishes whole tensors that this process is given one after the other, with a copy of them in host memory.

    Args:
        store: Where versions lie, as of `Publisher`; None: in this process's memory.
        listen: ``host:port`` at which it serves them over TCP; None: nowhere.
        model: A name of the model.
    """

    def __init__(self, store: str | None = None, listen: str | None = None, model: str = "") -> None:
        self._options: dict[str, Any] = {"store": store, "listen": listen, "model": model}
        self._host: dict[str, Tensor] = {}
        self._publisher: Publisher | None = None

    def next_version(self) -> int:
        """Return the number of the version that is published next."""
        if self._publisher is not None:
            return self._publisher.version + 1
        store = self._options["store"]
        return 0 if store is None else Index.read(open_store(store).index()).newest + 1

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int | None = None) -> dict[str, float]:
        """Publish a version.

        Args:
            weights: The whole tensors, each time of the same names, shapes and dtypes.
            version: Its number; None: the next one.

        Returns:
            The figures of the version, by names that begin with ``weights/``.

        Raises:
            ValueError: Names, shapes or dtypes are not those of the first version; nothing was published.
        """
        given = set()
        for name, tensor in weights:
            given.add(name)
            held = self._host.get(name)
            if held is None and self._publisher is None:
                self._host[name] = torch.empty_like(
                    tensor, device="cpu", memory_format=torch.contiguous_format
                )
            elif held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
                before = "missing" if held is None else f"{held.dtype} {list(held.shape)}"
                raise ValueError(
                    f"tensor {name!r}: {tensor.dtype} {list(tensor.shape)}; it was {before} before"
                )
            self._host[name].copy_(tensor.detach())
        if missing := self._host.keys() - given:
            raise ValueError(f"tensor {min(missing)!r}: it is missing, but was published before")
        if self._publisher is None:
            group = None
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            self._publisher = Publisher(self._host, group=group, **self._options)
        self._publisher.publish(version)
        figures: dict[str, float] = {}
        self._publisher.log(figures.update)
        return figures

    def close(self) -> None:
        """Stop serving."""
        if self._publisher is not None:
            self._publisher.close()


class Receiver:
    """The trainer's whole tensors in host memory, which follow its versions.

    Args:
        source: A folder, a URL of fsspec, or ``tcp://host:port``.
        model: The name of the model; empty: any.
        timeout_s: Seconds without any progress after which `receive` raises.
    """

    def __init__(self, source: str, model: str = "", timeout_s: float = 600.0) -> None:
        self._source, self._model, self._timeout_s = source, model, timeout_s
        self._host: dict[str, Tensor] = {}
        self._subscriber: Subscriber | None = None

    def receive(self, version: int) -> dict[str, Tensor]:
        """Wait for a version, and return the tensors, which the next call changes.

        Raises:
            CollectiveTimeout, MissingFile, PeerLost: It did not come in time, or the trainer cannot be reached.
            PatchRefused, PayloadCorrupt: It does not fit the version before, or is damaged.
        """
        if self._subscriber is None:
            store = open_store(self._source, timeout_s=self._timeout_s)
            deadline = time.monotonic() + self._timeout_s
            while not Index.read(store.index()).releases and time.monotonic() < deadline:
                time.sleep(store.poll_s)
            for name, tensor in published_tensors(store).items():
                self._host[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
            options: dict[str, Any] = {"model": self._model, "timeout_s": self._timeout_s}
            self._subscriber = Subscriber(self._host, self._source, **options)
        self._subscriber.update(at_least=version)
        return self._host

    def close(self) -> None:
        """End the connections."""
        if self._subscriber is not None:
            self._subscriber.close()
