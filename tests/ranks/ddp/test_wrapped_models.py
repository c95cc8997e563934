"""The hook with compilation, activation checkpointing and autocast, and copies of compressed models."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from dtcomm import ddp, fsdp, pipeline, tp
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD
from tests.unit.ddp.models import SMALL_BUCKETS, Net, backward, batch, gradients, wrapped


class Recomputed(nn.Module):
    """`Net` whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.net, x, use_reentrant=False)
        return out


# Dynamo splits its graphs at DDP's buckets, and is particular about their sizes: compiled models have the usual ones.


def compiled_inside() -> tuple[DistributedDataParallel, Callable[..., Any]]:
    net: Any = torch.compile(Net(), backend="aot_eager")
    model = DistributedDataParallel(net)
    return model, model


def compiled_outside() -> tuple[DistributedDataParallel, Callable[..., Any]]:
    model = DistributedDataParallel(
        Net()
    )  # dynamo splits its graph at buckets, and is particular about their sizes
    return model, torch.compile(model, backend="aot_eager")


def recomputed() -> tuple[DistributedDataParallel, Callable[..., Any]]:
    model = DistributedDataParallel(Recomputed(), **SMALL_BUCKETS)
    return model, model


def autocast() -> tuple[DistributedDataParallel, Callable[..., Any]]:
    model = DistributedDataParallel(Net(), **SMALL_BUCKETS)
    return model, model


WRAPPERS = {make.__name__: make for make in (compiled_inside, compiled_outside, recomputed, autocast)}


def compare_to_ddp(rank: int, world_size: int, wrapper: str) -> None:
    """Compare three steps with plain DDP, bit for bit for `none`; DDP rebuilds its buckets after the first one."""
    runs = {}
    for spec in ("", "none", "int8"):
        torch.manual_seed(0)
        model, call = WRAPPERS[wrapper]()
        state = ddp.compress(model, spec) if spec else None
        by_step = []
        for step in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if wrapper == "autocast" else nullcontext():
                out = call(batch(rank, step))
            out.float().square().mean().backward()
            by_step.append(gradients(model))
        runs[spec] = by_step
        if state is not None:
            assert state.steps == 3 and state.error is None
            assert {row.codec for row in state.report().rows} == {"none", spec}
    for plain, uncompressed, compressed in zip(runs[""], runs["none"], runs["int8"], strict=True):
        for name, gradient in plain.items():
            assert torch.equal(gradient, uncompressed[name]), name
            torch.testing.assert_close(
                gradient, compressed[name], rtol=0, atol=0.05 * float(gradient.abs().max())
            )


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_equal_those_of_plain_ddp(wrapper: str) -> None:
    run_ranks(compare_to_ddp, 2, wrapper)


def pickled(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "averaged": lambda model: AveragedModel(model).module,
    "pickled": pickled,
}


def copy_models(rank: int, world_size: int, steps_before: int) -> None:
    """Copies reduce without compression, the original with it; a copy may be compressed by itself."""
    model, plain = wrapped(**SMALL_BUCKETS), wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "int4", timeline=10)
    for step in range(steps_before):
        backward(model, rank, step)
    model.zero_grad()
    backward(plain, rank, 9)
    for make in COPIES.values():
        copied = make(model)
        backward(copied, rank, 9)
        assert all(torch.equal(value, gradients(plain)[name]) for name, value in gradients(copied).items())
        assert state.steps == steps_before
        copied = make(copied)
        own = ddp.compress(copied, "int8")
        backward(copied, rank, 10)
        assert own.steps == 1
    average: Any = AveragedModel(model)
    average.update_parameters(model)
    backward(model, rank, 10)
    assert state.steps == steps_before + 1
    for copied_state in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        with pytest.raises(RuntimeError, match=r"State.report: this is a copy, which compresses nothing"):
            copied_state.report()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_copies_of_compressed_models_are_not_compressed(steps_before: int) -> None:
    run_ranks(copy_models, 2, steps_before)


def copy_other_integrations(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,))
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    state = tp.compress(layers, mesh, "int8", {"0": "column", "1": "row"})
    x = torch.ones(2, 64)
    expected = layers(x)
    for copied in (copy.deepcopy(layers), AveragedModel(layers).module):
        assert torch.equal(copied(x), expected)
        assert copied[0].weight is not layers[0].weight
    with pytest.raises(TypeError, match=r"tp: .* save model.state_dict\(\)"):
        torch.save(layers, io.BytesIO())
    local = LocalSGD(nn.Linear(64, 64), every=2)
    for original in (state, local):
        with pytest.raises(RuntimeError, match="report: this is a copy"):
            copy.deepcopy(original).report()


def test_copies_of_tensor_parallel_models_use_the_same_group() -> None:
    run_ranks(copy_other_integrations, 2)


def copy_sharded(rank: int, world_size: int) -> None:
    """Copies of a model of `ShardedOptimizer` reduce nothing; those of the optimizer and of FSDP's state say so."""
    x = torch.full((2, 64), rank + 1.0)
    model = nn.Linear(64, 64)
    optimizer = fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, gradients="int8", lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    sent = optimizer.report().messages
    for copied in (copy.deepcopy(model), pickled(model)):
        copied(x).sum().backward()
        assert torch.equal(copied.weight.grad, x.sum(0).expand(64, 64))
    assert optimizer.report().messages == sent
    model(x).sum().backward()
    optimizer.step()
    assert optimizer.report().messages > sent
    sharded = fully_shard(nn.Linear(64, 64))
    state = fsdp.compress(sharded, "int8")
    sharded(x).sum().backward()
    for owner, name in ((state, "State"), (optimizer, "ShardedOptimizer")):
        for copied in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
            with pytest.raises(RuntimeError, match=f"{name}.report: this is a copy"):
                copied.report()
    sharded(x).sum().backward()
    assert state.report().messages == 2 * world_size


def test_copies_of_sharded_optimizers_and_fsdp_states() -> None:
    run_ranks(copy_sharded, 2)


def copy_stages(rank: int, world_size: int) -> None:
    """A copied stage sends uncompressed, as one that was never compressed."""

    def loss_of(stage: PipelineStage) -> float:
        losses: list[torch.Tensor] = []
        run = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
        given = {"target": torch.zeros(4, 64), "losses": losses} if rank else {}
        run.step(*(() if rank else (torch.linspace(-1, 1, 256).view(4, 64),)), **given)
        return sum(loss.item() for loss in losses)

    torch.manual_seed(rank)
    layer = nn.Linear(64, 64)
    plain, stage = (PipelineStage(layer, rank, world_size, torch.device("cpu")) for _ in range(2))
    expected = loss_of(plain)
    state = pipeline.compress(stage, "int4")
    compressed = loss_of(stage)
    assert (compressed != expected) == bool(rank)
    sent = state.report().messages
    for copied in (copy.deepcopy(stage), pickled(stage)):
        assert loss_of(copied) == expected
    assert state.report().messages == sent > 0
    assert loss_of(stage) == compressed and state.report().messages > sent
    again = copy.deepcopy(stage)
    pipeline.compress(again, "int4")
    assert loss_of(again) == compressed
    with pytest.raises(RuntimeError, match=r"State\.report: this is a copy"):
        copy.deepcopy(state).report()


def test_copies_of_stages_are_not_compressed() -> None:
    run_ranks(copy_stages, 2)
