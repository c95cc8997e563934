"""vLLM: a weight-transfer engine for its workers, and one for the trainer. Interfaces of 0.29.0 and 0.33.0 were read.

The two differ at the trainer: a ``WeightSource`` of 0.29 is iterated and has a method ``metadata``, one of 0.33 has
``iter_full`` and an attribute ``metadata``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, make_dataclass
from typing import Any

from torch import Tensor

from dtcomm.extensions.weights.engines import Receiver, Sender

VLLM = ((0, 29), "0.29.0 and 0.33.0")  # the oldest version, those whose interface was compared
_FACTORY, _BASE = "vllm.distributed.weight_transfer.factory", "vllm.distributed.weight_transfer.base"
_RELOAD = "vllm.model_executor.model_loader.reload"


def register_vllm(name: str = "dtcomm") -> None:
    """Register a weight-transfer engine of vLLM; call it in each process of vLLM, such as from a plugin.

    Each worker keeps the trainer's whole weights in host memory, applies patches to them, and hands them to the
    model's own loader between vLLM's layerwise reload. Initialization takes ``source`` and, if need be, ``model``; an
    update takes ``version``.

    Args:
        name: What ``WeightTransferConfig(backend=...)`` is given.

    Raises:
        ImportError: vLLM is not there, or its version is not one of the tested ones or later.

    Example:
        >>> register_vllm()  # doctest: +SKIP
    """
    factory, base = _modules()
    factory.WeightTransferEngineFactory.register_engine(name, _engine(base))


def register_vllm_trainer(name: str = "dtcomm") -> type:
    """Register a trainer's engine of vLLM, which publishes what a ``WeightSource`` yields, then updates the engines.

    Sources yield whole tensors. A module of FSDP2 or tensor parallelism needs no gather: pass it to `Publisher`.

    Args:
        name: The name under which vLLM's trainer factory finds the engine.

    Returns:
        The class of its init info: ``source`` is what engines read, ``store`` and ``listen`` are as of `Sender`.

    Raises:
        ImportError: vLLM is not there, or its version is not one of the tested ones or later.

    Example:
        On each rank of the trainer::

            Info = register_vllm_trainer()
            info = Info(rank=rank, source="tcp://trainer:29500", listen="0.0.0.0:29500")
            engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
            engine.send_weights()
    """
    factory, base = _modules()
    info = make_dataclass(
        "DtcommTrainerInitInfo",
        [("source", str), ("store", "str | None", None), ("listen", "str | None", None), ("model", str, "")],
        bases=(base.TrainerInitInfo,),
        namespace={"backend": name},
        kw_only=True,
    )
    factory.WeightTransferTrainerFactory.register_engine(name, _trainer_engine(base, info))
    return info


def _modules() -> tuple[Any, Any]:
    found = str(importlib.import_module("vllm").__version__)
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if numbers < VLLM[0]:
        raise ImportError(f"vllm {found}: expected {VLLM[0][0]}.{VLLM[0][1]} or later; tested with {VLLM[1]}")
    return importlib.import_module(_FACTORY), importlib.import_module(_BASE)


@dataclass
class _InitInfo:
    source: str
    model: str = ""
    timeout_s: float = 600.0


@dataclass
class _UpdateInfo:
    version: int


def _engine(base: Any) -> type:
    class DtcommWeightTransferEngine(base.WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = _InitInfo, _UpdateInfo
        supports_draft_weight_update = False
        _receiver: Receiver | None = None

        def init_transfer_engine(self, init_info: _InitInfo) -> None:
            self.shutdown()
            self._receiver = Receiver(**asdict(init_info))

        # The reload begins when a version was received and checked, so that a refused one leaves the model as it is.
        def start_weight_update(self) -> None:
            pass

        def finish_weight_update(self) -> None:
            pass

        def receive_weights(self, update_info: _UpdateInfo) -> None:
            assert self._receiver is not None, "vLLM calls init_transfer_engine before"
            host = self._receiver.receive(update_info.version)
            reload = importlib.import_module(_RELOAD)
            reload.initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights((name, each.to(self.device)) for name, each in host.items())
            finally:
                reload.finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            if self._receiver is not None:
                self._receiver.close()

    return DtcommWeightTransferEngine


def _trainer_engine(base: Any, info: type) -> type:
    class DtcommTrainerWeightTransferEngine(base.TrainerWeightTransferEngine):  # type: ignore[misc]
        init_info_cls = info

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
            if source is None or not getattr(source, "implements_iter_full", lambda: True)():
                raise ValueError(f"source={source!r}: expected a WeightSource that yields whole tensors")
            engine = cls(client=client, source=source, is_sender=init_info.is_sender)
            if engine.is_sender:
                engine._sender = Sender(init_info.store, init_info.listen, init_info.model)
                client.init_weight_transfer_engine({"source": init_info.source, "model": init_info.model})
            return engine

        def send_weights(self) -> None:
            # Each rank iterates, as a source may gather.
            pairs = self.source.iter_full() if hasattr(self.source, "iter_full") else iter(self.source)
            if not self.is_sender:
                for _ in pairs:
                    pass
                return
            metadata = self.source.metadata
            names = {meta.name for meta in (metadata() if callable(metadata) else metadata)}
            version = self._sender.next_version()
            self._sender.send(_all_of(names, pairs), version)
            self.client.start_weight_update()
            self.client.update_weights({"version": version})
            self.client.finish_weight_update()

        def shutdown(self) -> None:
            if self.is_sender:
                self._sender.close()

    return DtcommTrainerWeightTransferEngine


def _all_of(names: set[str], pairs: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the pairs; ValueError if the first rank does not have all tensors, such as with pipeline stages."""
    left = set(names)
    for name, tensor in pairs:
        if tensor is not None:
            left.discard(name)
            yield name, tensor
    if left:
        raise ValueError(
            f"source: rank 0 does not have {min(left)!r}, of {len(left)} of {len(names)} tensors"
        )
