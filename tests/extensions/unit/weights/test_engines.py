"""Adapters to engines, with recorded interfaces: the methods, arguments and calls of vLLM 0.29 and 0.33."""

from __future__ import annotations

import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtcomm.extensions.weights import Publisher
from dtcomm.extensions.weights.engines import register_vllm


class RecordedEngine(ABC):
    """The interface of vLLM's WeightTransferEngine, as far as a worker calls it."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.config, self.device, self.model = config, device, model
        self.model_config = vllm_config.model_config

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))  # type: ignore[attr-defined]

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class Model(nn.Module):
    """A model whose loader takes tensors by name, between the two calls of a layerwise reload."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls: list[str] = []

    def load_weights(self, weights: Any) -> None:
        self.calls.append("load")
        own = dict(self.named_parameters())
        for name, tensor in weights:
            own[name].data.copy_(tensor)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    engines: dict[str, type] = {}
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0"},
        "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": RecordedEngine},
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": SimpleNamespace(register_engine=engines.__setitem__)
        },
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: model.calls.append("begin"),
            "finalize_layerwise_reload": lambda model, config: model.calls.append(f"end {config}"),
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return engines


def test_vllm_loads_each_version(registered: dict[str, type], tmp_path: Path) -> None:
    register_vllm()
    weights: dict[str, Tensor] = {"linear.weight": torch.randn(2, 3), "linear.bias": torch.randn(2)}
    publisher, model = Publisher(weights, tmp_path), Model()
    engine: Any = registered["dtcomm"](None, SimpleNamespace(model_config="c"), torch.device("cpu"), model)
    engine.init_transfer_engine(engine.init_info_cls(source=str(tmp_path)))
    for _ in range(3):
        weights["linear.bias"] += 1
        version = publisher.publish()
        engine.start_weight_update()
        engine.update_weights({"version": version})
        engine.finish_weight_update()
        assert torch.equal(model.linear.bias, weights["linear.bias"])
        assert torch.equal(model.linear.weight, weights["linear.weight"])
    assert model.calls == ["begin", "load", "end c"] * 3
    engine.shutdown()


def test_an_older_vllm_is_refused(registered: dict[str, type], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.28.1")
    with pytest.raises(ImportError, match=r"vllm 0\.28\.1: expected 0\.29 or later"):
        register_vllm()


def test_the_recorded_interface_is_that_of_vllm() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    base = importlib.import_module("vllm.distributed.weight_transfer.base").WeightTransferEngine
    assert base.__abstractmethods__ == RecordedEngine.__abstractmethods__
    for name in ("__init__", "update_weights", *RecordedEngine.__abstractmethods__):
        recorded, upstream = (inspect.signature(getattr(each, name)) for each in (RecordedEngine, base))
        assert list(recorded.parameters) == list(upstream.parameters), name
