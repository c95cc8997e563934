"""Adapters to inference engines. Names of their modules, and the versions that were read, stand here only."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

import torch

from dtcomm.extensions.weights.courier import Subscriber
from dtcomm.extensions.weights.reshard import published_tensors

VLLM = ((0, 29), "0.29.0 and 0.33.0")  # the oldest version, those whose interface was compared
_VLLM_FACTORY, _VLLM_BASE = (
    "vllm.distributed.weight_transfer.factory",
    "vllm.distributed.weight_transfer.base",
)
_VLLM_RELOAD = "vllm.model_executor.model_loader.reload"


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
    found = str(importlib.import_module("vllm").__version__)
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if numbers < VLLM[0]:
        raise ImportError(f"vllm {found}: expected {VLLM[0][0]}.{VLLM[0][1]} or later; tested with {VLLM[1]}")
    factory, base = (importlib.import_module(module) for module in (_VLLM_FACTORY, _VLLM_BASE))
    factory.WeightTransferEngineFactory.register_engine(name, _vllm_engine(base))


@dataclass
class _InitInfo:
    source: str
    model: str = ""
    timeout_s: float = 600.0


@dataclass
class _UpdateInfo:
    version: int


def _vllm_engine(base: Any) -> type:
    class DtcommWeightTransferEngine(base.WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = _InitInfo, _UpdateInfo
        supports_draft_weight_update = False
        _subscriber: Subscriber | None = None

        def init_transfer_engine(self, init_info: _InitInfo) -> None:
            self._init_info = init_info

        # The reload begins when a version was received and checked, so that a refused one leaves the model as it is.
        def start_weight_update(self) -> None:
            pass

        def finish_weight_update(self) -> None:
            pass

        def receive_weights(self, update_info: _UpdateInfo) -> None:
            info = self._init_info
            if self._subscriber is None:
                published = published_tensors(info.source)
                self._host = {
                    name: torch.zeros(each.shape, dtype=each.dtype) for name, each in published.items()
                }
                self._subscriber = Subscriber(
                    self._host, info.source, model=info.model, timeout_s=info.timeout_s
                )
            self._subscriber.update(at_least=update_info.version)
            reload = importlib.import_module(_VLLM_RELOAD)
            reload.initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights((name, each.to(self.device)) for name, each in self._host.items())
            finally:
                reload.finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            if self._subscriber is not None:
                self._subscriber.close()

    return DtcommWeightTransferEngine
