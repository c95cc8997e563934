"""The checkpoint engine in the calls of verl 0.9.1 and of NeMo-RL, in their order; their base classes are recorded."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dtcomm.extensions.weights.engines import checkpoint_engine
from dtcomm.extensions.weights.engines.checkpoint_engine import CheckpointEngine


class VerlEngine(ABC):
    """What verl's CheckpointEngine asks for."""

    @abstractmethod
    def prepare(self) -> Any: ...

    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Any) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> Any: ...

    @abstractmethod
    def finalize(self) -> Any: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class NemoRLEngine(ABC):
    """What NeMo-RL's CheckpointEngine asks for."""

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Any
    ) -> Any: ...

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Any
    ) -> Any: ...

    @abstractmethod
    def finalize(self) -> Any: ...

    @abstractmethod
    async def send_weights(self, weights: Any) -> Any: ...

    @abstractmethod
    def receive_weight_batches(self) -> Any: ...


def model(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(5, 3, generator=generator).bfloat16() + step for name in ("a", "b", "c")}


class Gather:
    """A generator of whole tensors that counts the ranks that iterate to its end, as a gather needs all of them."""

    def __init__(self) -> None:
        self.ends = 0

    def __call__(self, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from weights.items()
        self.ends += 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("base", [VerlEngine, NemoRLEngine])
def test_the_engine_takes_the_calls_of_both(base: type) -> None:
    for name in base.__abstractmethods__:  # type: ignore[attr-defined]
        ours, asked = (inspect.signature(getattr(each, name)).parameters for each in (CheckpointEngine, base))
        takes_rest = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in ours.values())
        named = {key for key, each in asked.items() if each.kind is not inspect.Parameter.VAR_KEYWORD}
        assert takes_rest or named <= ours.keys(), name
        required = {
            key
            for key, each in ours.items()
            if each.default is each.empty and each.kind is not each.VAR_KEYWORD
        }
        assert required <= named or name == "init_process_group", name


def test_updates_of_verl(tmp_path: Path) -> None:
    """`CheckpointEngineManager.update_weights`: prepare, topology, groups, both sides at once, finalize."""
    options: Any = {"bucket_size": 1 << 20, "source": str(tmp_path), "store": str(tmp_path), "device": "cpu"}
    actors = [CheckpointEngine(is_master=rank == 0, **options) for rank in range(2)]
    rollouts = [CheckpointEngine(**options) for _ in range(2)]
    gather = Gather()

    async def receive(engine: CheckpointEngine, step: int) -> dict[str, Tensor]:
        return {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=step)}

    async def update(step: int) -> list[Any]:
        metadata = [engine.prepare() for engine in (*actors, *rollouts)]
        for engines, arguments in zip(
            (actors, rollouts), CheckpointEngine.build_topology(len(actors), len(rollouts), metadata)
        ):
            assert all(len(values) == len(engines) for values in arguments.values())
            for rank, engine in enumerate(engines):
                engine.init_process_group(**{key: values[rank] for key, values in arguments.items()})
        received = [asyncio.create_task(receive(engine, step)) for engine in rollouts]
        await asyncio.sleep(0)  # rollout workers wait before there is anything to receive
        metrics = [await engine.send_weights(gather(model(step)), global_steps=step) for engine in actors]
        assert metrics[0]["weights/elements"] == 45 and metrics[1] == {}
        for engine in (*actors, *rollouts):
            engine.finalize()
        return list(await asyncio.gather(*received))

    for step in (0, 1, 1, 2):  # one step is sent twice
        for weights in asyncio.run(update(step)):
            assert all(torch.equal(weights[name], tensor) for name, tensor in model(step).items())
    assert gather.ends == 8


def test_updates_of_nemo_rl_over_tcp() -> None:
    """`CheckpointEngineWeightSynchronizer`: groups once, then any number of updates."""
    address = f"127.0.0.1:{free_port()}"
    options: Any = {"source": f"tcp://{address}", "listen": address, "release_after_refit": False}
    engines = [CheckpointEngine(bucket_size=70, device="cpu", **options) for _ in range(3)]
    metadata = [{**engine.prepare(), "rank": rank} for rank, engine in enumerate(engines)]
    sizes: Any = {"train_world_size": 2, "rollout_world_size": 1, "metadata": metadata}
    for rank, engine in enumerate(engines[:2]):
        engine.init_policy_process_group(worker_rank=rank, **sizes)
        assert engine.get_target_weight_layout() is None and not engine.shard_expert_weights
    engines[2].init_rollout_process_group(rollout_rank=0, **sizes)

    async def update(step: int) -> list[list[tuple[str, Tensor]]]:
        async def receive() -> list[list[tuple[str, Tensor]]]:
            return [batch async for batch in engines[2].receive_weight_batches()]

        task = asyncio.create_task(receive())
        await asyncio.sleep(0)
        for engine in engines[:2]:
            await engine.send_weights(Gather()(model(step)))
        return await task

    for step in range(3):
        batches = asyncio.run(update(step))
        assert [len(batch) for batch in batches] == [2, 1]  # 30 bytes each, at most 70
        for name, tensor in (pair for batch in batches for pair in batch):
            assert torch.equal(tensor, model(step)[name])
    for engine in engines:
        engine.close()


def test_other_tensors_are_refused_before_they_are_published(tmp_path: Path) -> None:
    engine = CheckpointEngine(1 << 20, str(tmp_path), store=str(tmp_path))
    engine.init_process_group(0, 0)
    asyncio.run(engine.send_weights(model(0).items()))
    for change, message in (
        ({"d": torch.zeros(1)}, r"tensor 'd': torch.float32 \[1\]; it was missing before"),
        ({"b": torch.zeros(2)}, r"tensor 'b': torch.float32 \[2\]; it was torch.bfloat16 \[5, 3\] before"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(engine.send_weights({**model(1), **change}.items()))
    with pytest.raises(ValueError, match=r"tensor 'c': it is missing, but was published before"):
        asyncio.run(engine.send_weights(list(model(1).items())[:2]))
    assert engine.prepare() == {"version": 1}
    engine.close()


def test_verl_imports_the_module_to_register_it(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, type] = {}

    class Registry:
        """verl's registry: `register` is a decorator's maker, without self."""

        def register(backend: str) -> Any:  # type: ignore[misc] # noqa: N805
            return lambda cls: registered.setdefault(backend, cls)

    verl = SimpleNamespace(CheckpointEngineRegistry=Registry)
    monkeypatch.setitem(sys.modules, "verl.checkpoint_engine.base", verl)
    importlib.reload(checkpoint_engine)
    assert registered["dtcomm"].__name__ == "CheckpointEngine"
