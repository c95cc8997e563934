"""A trainer publishes versions of its weights, and engines follow them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtcomm.arguments import require_int
from dtcomm.cli import show_progress
from dtcomm.errors import CollectiveTimeout, DtcommError
from dtcomm.extensions.weights import store as stores
from dtcomm.extensions.weights.patch import (
    HEAD_BYTES,
    Patch,
    Slice,
    State,
    Weights,
    checksum,
    diff,
    on_cpu,
    slices_of,
)
from dtcomm.extensions.weights.store import INDEX, MemoryStore, MissingFile, Release, Server, Store

_log = logging.getLogger("dtcomm")
_POLL_SECONDS = 0.05


class Publisher:
    """Publishes the weights of a trainer: a version is what changed since the one before, and sometimes all of it.

    Each rank of the group publishes its own shards; no rank gathers the model. What several ranks hold is published
    by the first of them. A publisher keeps one copy of its shards in host memory. One that begins, and one whose last
    `publish` failed, publishes whole weights.

    Args:
        weights: A module, whose state dict is published, or tensors by name; DTensors and `Slice` are shards.
        store: A folder or URL of fsspec, which all ranks reach; None: this process's memory, for one rank.
        listen: ``host:port`` at which the first rank serves the store over TCP; None: nowhere.
        model: A name of the model, which patches carry.
        dtype: Floating-point weights are published in this dtype, such as ``torch.bfloat16``; None: their own.
        anchor_every: Each so many versions are published whole, too, for receivers that come late.
        keep: How many of these whole versions stay, and the changes since the first of them.
        group: The ranks of the trainer; None: all, or this process alone where torch.distributed is not used.
        part_bytes: Bytes of weights in one patch.
        threads: Threads that encode; 0: as many as torch uses.
        progress: Whether to show a line of progress on a terminal.
    """

    def __init__(
        self,
        weights: nn.Module | State,
        store: str | Path | Store | None = None,
        *,
        listen: str | None = None,
        model: str = "",
        dtype: torch.dtype | None = None,
        anchor_every: int = 50,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
        part_bytes: int = 256 << 20,
        threads: int = 0,
        progress: bool = False,
    ) -> None:
        for name, value in (("anchor_every", anchor_every), ("keep", keep), ("part_bytes", part_bytes)):
            require_int(name, value, 1)
        is_one_of_many = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self._rank = dist.get_rank(group) if is_one_of_many else 0
        self._group, self._is_one_of_many = group, is_one_of_many
        if store is None and (is_one_of_many or listen is None):
            raise ValueError(
                "store=None: expected a folder or URL; only a single rank with listen= needs none"
            )
        self._weights, self._model, self._dtype, self._threads = weights, model, dtype, threads
        self._store = MemoryStore() if store is None else stores.open_store(store)
        self._anchor_every, self._keep, self._part_bytes, self._shows = (
            anchor_every,
            keep,
            part_bytes,
            progress,
        )
        self._run = os.urandom(4).hex()
        self._old: dict[str, Slice] | None = None  # what was published last, by this rank
        self._sums: dict[str, int] = {}
        self._since_anchor, self._report = 0, dict[str, Any]()
        index = stores.read_index(stores.read_store_index(self._store))
        self.version = stores.newest(index)
        self._owned = self._find_owned()
        self.server = Server(self._store, listen) if listen is not None and self._rank == 0 else None

    def publish(self, version: int | None = None) -> int:
        """Publish the weights as they are now; all ranks call it.

        Args:
            version: Its number, above the last one; None: the next one.

        Returns:
            The version.

        Raises:
            DtcommError: A rank could not; nothing was published, and the next version is whole.
        """
        version = self.version + 1 if version is None else version
        require_int("version", version, self.version + 1)
        begun, olds = time.perf_counter(), self._old
        is_anchor = olds is None or self._since_anchor + 1 >= self._anchor_every
        # Until the version is complete, what this rank holds as the last one may be a mixture.
        self._old, report = None, dict.fromkeys(("bytes", "weights_bytes", "elements", "changed"), 0)
        releases: list[list[tuple[str, int]]] = [[], []]  # changes, whole weights
        error = ""
        try:
            news = {name: part for name, part in self._slices().items() if name in self._owned}
            kept = {} if olds is None else olds
            for number, names in enumerate(self._parts(news)):
                show_progress(f"version {version}: part {number + 1}") if self._shows else None
                part = {name: self._cast(news[name]) for name in names}
                if olds is not None:
                    before = {name: olds[name] for name in names}
                    patch = diff(before, part, base=self.version, version=version, model=self._model,
                                 threads=self._threads, checksums=self._sums)  # fmt: skip
                    releases[0].append(self._put(f"{version}.{self._rank}.{number}.{self._run}.delta", patch))
                    for entry in Patch.read(patch, head_only=True).entries:
                        report["changed"] += entry.changed
                    report["bytes"] += len(patch)
                if is_anchor:
                    patch = diff(None, part, version=version, model=self._model, checksums=self._sums)
                    releases[1].append(self._put(f"{version}.{self._rank}.{number}.{self._run}.full", patch))
                    report["bytes"] += len(patch) if olds is None else 0
                for name, each in part.items():
                    if name in kept:
                        kept[name].tensor.copy_(each.tensor)
                    else:
                        kept[name] = each._replace(tensor=each.tensor.clone())
                    report["elements"] += each.tensor.numel()
                    report["weights_bytes"] += each.tensor.nbytes
        except (DtcommError, OSError, ValueError, RuntimeError) as caught:
            if not self._is_one_of_many:
                raise
            error = f"rank {self._rank}: {caught}"
        gathered = self._gather((error, releases, report))
        if errors := [each[0] for each in gathered if each[0]]:
            raise DtcommError(f"version {version} was not published: {'; '.join(errors)}")
        base = self.version if olds is not None else None
        if self._rank == 0:
            self._write_index(version, base, [each[1] for each in gathered])
        self._gather(None)  # the index is there when the call returns
        show_progress() if self._shows else None
        self._old, self.version = kept, version
        self._since_anchor = 0 if is_anchor else self._since_anchor + 1
        totals = {key: sum(each[2][key] for each in gathered) for key in report}
        self._report = {
            "version": version,
            **totals,
            **_ratios(totals),
            "diff_s": time.perf_counter() - begun,
        }
        return version

    def report(self) -> dict[str, Any]:
        """Return the figures of the last version, of all ranks: bytes, share changed, bits per change, seconds."""
        return dict(self._report)

    def log(self, logger: Callable[[dict[str, float]], object]) -> None:
        """Pass the figures to ``logger``, such as ``wandb.log``, by names that begin with ``weights/``."""
        logger({f"weights/{name}": float(value) for name, value in self._report.items()})

    def close(self) -> None:
        """Stop serving."""
        if self.server is not None:
            self.server.close()

    def _slices(self) -> dict[str, Slice]:
        state = self._weights.state_dict() if isinstance(self._weights, nn.Module) else self._weights
        return slices_of(state)

    def _cast(self, part: Slice) -> Slice:
        tensor = part.tensor
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return part._replace(tensor=on_cpu(tensor))

    def _parts(self, slices: Mapping[str, Slice]) -> Iterator[list[str]]:
        names: list[str] = []
        size = 0
        for name, part in slices.items():
            if names and size + part.tensor.nbytes > self._part_bytes:
                yield names
                names, size = [], 0
            names.append(name)
            size += part.tensor.nbytes
        if names:
            yield names

    def _find_owned(self) -> set[str]:
        """Return the names that this rank publishes: what several ranks hold belongs to the first of them."""
        slices = self._slices()
        if not self._is_one_of_many:
            return set(slices)
        held = {
            name: (part.offset, tuple(part.tensor.shape), checksum(on_cpu(part.tensor)))
            for name, part in slices.items()
        }
        owned = set(slices)
        for rank, others in enumerate(self._gather(held)[: self._rank]):
            for name in owned & others.keys():
                if others[name][:2] == held[name][:2]:
                    owned.discard(name)
                    if others[name] != held[name]:
                        raise ValueError(
                            f"tensor {name!r}: ranks {rank} and {self._rank} hold other values of it; where each holds"
                            " a shard, give a DTensor or a Slice"
                        )
        return owned

    def _gather(self, value: Any) -> list[Any]:
        if not self._is_one_of_many:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _put(self, name: str, patch: bytes) -> tuple[str, int]:
        self._store.put(name, patch)
        return name, len(patch)

    def _write_index(
        self, version: int, base: int | None, of_ranks: list[list[list[tuple[str, int]]]]
    ) -> None:
        """Add a version to the index, delete what no receiver needs any more, and what no index names."""
        before = stores.read_index(stores.read_store_index(self._store))
        releases = list(before)
        for kind, its_base in enumerate((base, None)):
            if parts := tuple(part for of_rank in of_ranks for part in of_rank[kind]):
                releases.append(Release(version, its_base, parts))
        anchors = sorted(each.version for each in releases if each.base is None)
        oldest = anchors[-self._keep :][0]
        kept = [each for each in releases if (each.version if each.base is None else each.base) >= oldest]
        self._store.put(INDEX, stores.write_index(kept))
        named = {name for each in kept for name, _ in each.parts}
        for name in {name for each in before for name, _ in each.parts} - named:
            self._store.delete(name)


class Subscriber:
    """Keeps the weights of an engine at the newest version.

    Args:
        weights: The engine's weights: a module, or tensors by name; see `Weights`. They are changed in place. Or
            `Weights`, such as `Resharded`; then ``version``, ``buffers`` and ``model`` are not used.
        source: Where versions come from: a folder, a URL of fsspec, or ``tcp://host:port`` of a publisher or relay.
        version: The version of the weights, if it is known. Else they are compared with the newest versions, and
            received whole if they equal none.
        buffers: 1: a version is decoded in place during the pause; 2: before it, into a second buffer.
        model: The name of the model; empty: any.
        connections: TCP connections that carry a version.
        timeout_s: Seconds without any progress after which `update` raises.
        pause: Called before weights change; returns a context manager that is left after it, such as one that stops
            and resumes the engine.
        progress: Whether to show a line of progress on a terminal.
    """

    def __init__(
        self,
        weights: nn.Module | State | Weights,
        source: str | Path | Store,
        *,
        version: int | None = None,
        buffers: int = 1,
        model: str = "",
        connections: int = 4,
        timeout_s: float = 60.0,
        pause: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        progress: bool = False,
    ) -> None:
        if isinstance(weights, Weights):
            self.weights = weights
        else:
            state = weights.state_dict() if isinstance(weights, nn.Module) else weights
            self.weights = Weights(state, version=version, buffers=buffers, model=model)
        self._source = stores.open_store(source, connections=connections, timeout_s=timeout_s)
        self._timeout_s, self._pause, self._shows = timeout_s, pause, progress
        self._report: dict[str, Any] = {}

    @property
    def version(self) -> int | None:
        """The version of the weights; None if it is not known."""
        return self.weights.version

    def update(self, *, at_least: int | None = None, timeout_s: float | None = None) -> int | None:
        """Receive and apply all versions up to the newest one.

        Args:
            at_least: Wait for this version. Default None: wait for none.
            timeout_s: Seconds to wait for it; None: those of the subscriber.

        Returns:
            The version of the weights; None if nothing was published yet.

        Raises:
            CollectiveTimeout: The version did not come in time.
            PeerLost: The server cannot be reached.
            PatchRefused, PayloadCorrupt: A version does not fit these weights or is damaged; nothing was changed.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        if self.weights.interrupted is not None:
            self.weights.commit(self.weights.interrupted)
        index, totals = b"", dict.fromkeys(("bytes", "weights_bytes", "elements", "changed"), 0)
        seconds = dict.fromkeys(("receive_s", "check_s", "pause_s"), 0.0)
        while True:
            waits = at_least is not None and (self.version is None or self.version < at_least)
            wait_s = max(0.0, deadline - time.monotonic()) if index and waits else 0.0
            index = stores.read_store_index(self._source, index, wait_s)
            releases = stores.read_index(index)
            try:
                if self.version is None and releases:
                    self._adopt(releases)
                for release in stores.route(releases, self.version):
                    self._apply(release, totals, seconds)
            except MissingFile:  # it was deleted after the index was read
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_SECONDS)
                index = b""
                continue
            if at_least is None or (self.version is not None and self.version >= at_least):
                break
            if time.monotonic() >= deadline:
                raise CollectiveTimeout(
                    f"version {at_least} was not published in time; the newest is {self.version}"
                )
            time.sleep(0 if index else _POLL_SECONDS)
        self._report = {
            "version": -1 if self.version is None else self.version,
            **totals,
            **_ratios(totals),
            **seconds,
        }
        return self.version

    def report(self) -> dict[str, Any]:
        """Return the figures of the last `update`: bytes, share changed, seconds of receive, check and pause."""
        return dict(self._report)

    def log(self, logger: Callable[[dict[str, float]], object]) -> None:
        """Pass the figures to ``logger``, such as ``wandb.log``, by names that begin with ``weights/``."""
        logger({f"weights/{name}": float(value) for name, value in self._report.items()})

    def close(self) -> None:
        """End the connections."""
        if isinstance(self._source, stores.RemoteStore):
            self._source.close()

    def _adopt(self, releases: tuple[Release, ...]) -> None:
        """Take the number of a version that the weights have already, by its checksums alone."""
        for release in sorted(releases, key=lambda each: (each.version, each.base is None), reverse=True):
            names = [name for name, _ in release.parts]
            starts = self._fetch([(name, HEAD_BYTES) for name in names])
            sizes = [HEAD_BYTES + int.from_bytes(start[8:12], "little") for start in starts]
            heads = [
                Patch.read(head, head_only=True) for head in self._fetch(list(zip(names, sizes, strict=True)))
            ]
            if self.weights.adopt(heads):
                return

    def _apply(self, release: Release, totals: dict[str, int], seconds: dict[str, float]) -> None:
        begun = time.perf_counter()
        if self._shows:
            show_progress(f"version {release.version}: {release.size / 1e6:.0f} MB")
        patches = self._fetch(release.parts)
        show_progress() if self._shows else None
        received = time.perf_counter()
        prepared = self.weights.prepare(patches)
        checked = time.perf_counter()
        with self._pause():
            before = time.perf_counter()
            self.weights.commit(prepared)
            seconds["pause_s"] += time.perf_counter() - before
        seconds["receive_s"] += received - begun
        seconds["check_s"] += checked - received
        totals["bytes"] += release.size
        for entry in (entry for patch in prepared.patches for entry in patch.entries):
            count = entry.numel
            totals["elements"] += count
            totals["weights_bytes"] += count * getattr(torch, entry.dtype).itemsize
            totals["changed"] += entry.changed if release.base is not None else 0

    def _fetch(self, files: Sequence[tuple[str, int]]) -> list[bytearray]:
        if isinstance(self._source, stores.RemoteStore):
            return self._source.fetch_all(files)
        return [bytearray(self._source.get(name, 0, size)) for name, size in files]


def _ratios(totals: Mapping[str, int]) -> dict[str, float]:
    changed, elements = totals["changed"], totals["elements"]
    return {
        "share_changed": changed / elements if elements else 0.0,
        "bits_per_changed": totals["bytes"] * 8 / changed if changed else 0.0,
    }
