"""Engines of vLLM, with recorded interfaces: the methods, arguments and calls of vLLM 0.29.0 and 0.33.0."""

from __future__ import annotations

import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtcomm.extensions.weights import Publisher
from dtcomm.extensions.weights.engines.vllm import register_vllm, register_vllm_trainer


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


@dataclass
class RecordedInitInfo:
    """vLLM's TrainerInitInfo: `backend` is an attribute of each class."""

    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        assert cls.backend  # type: ignore[attr-defined]

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class RecordedTrainer(ABC):
    """vLLM's TrainerWeightTransferEngine: 0.33 also takes `rank`, which has a default."""

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.is_sender, self.client, self.source = is_sender, client, source

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...

    def shutdown(self) -> None:
        raise AssertionError("the engine has its own")


class OldSource:
    """A WeightSource of 0.29; a tensor that the rank does not hold is None."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights, self.passes = weights, 0

    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.weights]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.weights.items()
        self.passes += 1


class NewSource:
    """A WeightSource of 0.33; a tensor that the rank does not own is left out."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights, self.passes = weights, 0

    @property
    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.weights]

    def implements_iter_full(self) -> bool:
        return True

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, tensor) for name, tensor in self.weights.items() if tensor is not None)
        self.passes += 1


class Client:
    """vLLM's four calls of a trainer's client, which reach one engine."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.calls = engine, list[str]()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.init_info_cls(**init_info))

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append(f"update {update_info['version']}")
        self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        self.engine.finish_weight_update()


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
    trainers: dict[str, type] = {}
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0"},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": RecordedEngine,
            "TrainerInitInfo": RecordedInitInfo,
            "TrainerWeightTransferEngine": RecordedTrainer,
        },
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": SimpleNamespace(register_engine=engines.__setitem__),
            "WeightTransferTrainerFactory": SimpleNamespace(
                register_engine=lambda name, engine: trainers.setdefault(name, engine),
                trainer_init=lambda info, **rest: trainers[info.backend].trainer_init(info, **rest),  # type: ignore[attr-defined]
            ),
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


@pytest.mark.parametrize("kind", [OldSource, NewSource])
def test_a_trainer_publishes_what_a_source_yields(
    registered: dict[str, type], tmp_path: Path, kind: Any
) -> None:
    register_vllm()
    info, factory = register_vllm_trainer(), sys.modules["vllm.distributed.weight_transfer.factory"]
    weights: dict[str, Any] = {"linear.weight": torch.randn(2, 3), "linear.bias": torch.randn(2)}
    model = Model()
    client = Client(
        registered["dtcomm"](None, SimpleNamespace(model_config="c"), torch.device("cpu"), model)  # type: ignore[call-arg]
    )
    sources = [kind(weights) for _ in range(2)]
    ranks = [
        factory.WeightTransferTrainerFactory.trainer_init(
            info(rank=rank, source=str(tmp_path), store=str(tmp_path)), client=client, source=source
        )
        for rank, source in enumerate(sources)
    ]
    for _ in range(3):
        weights["linear.bias"] += 1
        for each in reversed(ranks):
            each.send_weights()
        assert torch.equal(model.linear.bias, weights["linear.bias"])
        assert torch.equal(model.linear.weight, weights["linear.weight"])
    assert client.calls == [call for version in range(3) for call in ("start", f"update {version}", "finish")]
    assert [source.passes for source in sources] == [3, 3]
    weights["linear.bias"] = None  # another rank's, as of a pipeline stage
    with pytest.raises(ValueError, match=r"rank 0 does not have 'linear.bias', of 1 of 2 tensors"):
        ranks[0].send_weights()
    assert len(client.calls) == 9
    for each in ranks:
        each.shutdown()
    client.engine.shutdown()
    with pytest.raises(ValueError, match="source=None"):
        factory.WeightTransferTrainerFactory.trainer_init(info(rank=0, source=""), client=client, source=None)


def test_an_older_vllm_is_refused(registered: dict[str, type], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.28.1")
    with pytest.raises(ImportError, match=r"vllm 0\.28\.1: expected 0\.29 or later"):
        register_vllm()


def test_the_recorded_interface_is_that_of_vllm() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    compare_with(importlib.import_module("vllm.distributed.weight_transfer.base"))


def compare_with(base: Any) -> None:
    engine, trainer = base.WeightTransferEngine, base.TrainerWeightTransferEngine
    assert engine.__abstractmethods__ == RecordedEngine.__abstractmethods__
    for name in ("__init__", "update_weights", *RecordedEngine.__abstractmethods__):
        recorded, upstream = (inspect.signature(getattr(each, name)) for each in (RecordedEngine, engine))
        assert list(recorded.parameters) == list(upstream.parameters), name
    assert trainer.__abstractmethods__ == RecordedTrainer.__abstractmethods__
    for name in ("__init__", "trainer_init", "send_weights", "shutdown"):
        recorded, upstream = (inspect.signature(getattr(each, name)) for each in (RecordedTrainer, trainer))
        assert recorded.parameters.keys() <= upstream.parameters.keys(), name
    for name in (
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ):
        recorded, upstream = (
            inspect.signature(getattr(each, name)) for each in (Client, base.VLLMWeightSyncClient)
        )
        assert list(recorded.parameters) == list(upstream.parameters), name
