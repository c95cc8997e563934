"""Compressor state through torch.distributed.checkpoint, and damaged states of every integration."""

from __future__ import annotations

import io
import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe

from dtcomm import ddp, fsdp
from dtcomm.compress.checkpoint import Checkpointed, Compressor, restore, seal
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD
from dtcomm.pipeline import compress as compress_stages
from tests.ranks.fsdp.models import sharded
from tests.ranks.fsdp.models import train as train_sharded
from tests.ranks.fsdp.test_sharded_optimizer import make_optimizer
from tests.ranks.fsdp.test_sharded_optimizer import train as train_optimizer
from tests.ranks.pipeline.test_stages import batch as stage_batch
from tests.ranks.pipeline.test_stages import make_schedule, run_step, stages_of
from tests.unit.ddp.models import Net, backward, batch, wrapped


def save(rank: int, n: int, path: Path) -> dict[str, Any]:
    model = wrapped()
    state = ddp.compress(model, "int4", feedback=True)
    for step in range(3):
        backward(model, rank, step)
    checkpoint.save({"model": model.state_dict(), "compression": Checkpointed(state)}, checkpoint_id=path)
    return dict(state.state_dict())


def load(rank: int, n: int, path: Path) -> dict[str, Any]:
    model = wrapped()
    state = ddp.compress(model, "int4", feedback=True)
    restore(state, path, "compression")
    restored = dict(state.state_dict())
    backward(model, rank, 3)
    return restored


def load_with_torch(rank: int, n: int, path: Path) -> dict[str, Any]:
    model = wrapped()
    state = ddp.compress(model, "int4", feedback=True)
    target = {"model": model.state_dict(), "compression": Checkpointed(state)}
    checkpoint.load(target, checkpoint_id=path)
    return dict(state.state_dict())


def test_ranks_get_their_own_states_on_the_same_number_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, tmp_path / "run")
    for loaded in (run_ranks(load, 2, tmp_path / "run"), run_ranks(load_with_torch, 2, tmp_path / "run")):
        for before, after in zip(saved, loaded, strict=True):
            assert before["residuals"].keys() == after["residuals"].keys() and before["residuals"]
            for name, residual in before["residuals"].items():
                assert torch.equal(residual, after["residuals"][name])
    name = next(iter(saved[0]["residuals"]))
    assert not torch.equal(*(state["residuals"][name] for state in saved))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2)])
def test_residuals_keep_their_sum_on_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    saved = run_ranks(save, before, tmp_path / "run")
    loaded = run_ranks(load, after, tmp_path / "run")
    for name in saved[0]["residuals"]:
        total = sum(state["residuals"][name].double() for state in saved)
        restored = sum(state["residuals"][name].double() for state in loaded if name in state["residuals"])
        assert torch.allclose(total, restored, atol=1e-7)  # type: ignore[arg-type]


def check_refusals(rank: int, n: int, path: Path) -> None:
    model = wrapped()
    state = ddp.compress(model, "int4", feedback=True)
    backward(model, rank, 0)
    with pytest.raises(ValueError, match=r"key: no compressor was saved under 'other'.*compression"):
        restore(state, path, "other")
    # Without `Checkpointed` all ranks would get one rank's residuals, which is detected.
    bare = path.with_name("bare")
    checkpoint.save({"compression": state}, checkpoint_id=bare)
    message = ""
    try:
        checkpoint.load({"compression": state}, checkpoint_id=bare)
    except (ValueError, checkpoint.CheckpointException) as error:
        message = str(error)
    messages: list[Any] = [None] * n
    dist.all_gather_object(messages, message)
    assert any("wrap the state in dtcomm.compress.checkpoint.Checkpointed" in text for text in messages), (
        messages
    )


def test_invalid_calls_are_refused(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path / "run")
    run_ranks(check_refusals, 2, tmp_path / "run")


def of_ddp(spec: str, **options: Any) -> tuple[Compressor, Callable[[], object]]:
    model = wrapped()
    return ddp.compress(model, spec, **options), lambda: backward(model, dist.get_rank(), 0)


def of_fsdp(spec: str, parameters: str) -> tuple[Compressor, Callable[[], object]]:
    model = sharded(init_device_mesh("cpu", (2,)))
    state = fsdp.compress(model, gradients=spec, parameters=parameters)
    return state, lambda: train_sharded(model, dist.get_rank(), 1)


def of_sharded_optimizer(spec: str) -> tuple[Compressor, Callable[[], object]]:
    model, optimizer = make_optimizer(gradients=spec)
    return optimizer, lambda: train_optimizer(model, optimizer, dist.get_rank(), range(1))


def of_local_sgd(spec: str) -> tuple[Compressor, Callable[[], object]]:
    model = Net()
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9)
    local = LocalSGD(model, 2, spec, feedback=True, outer=outer, delay=1)

    def step() -> None:
        for number in range(3):
            model(batch(dist.get_rank(), number)).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            local.step()

    return local, step


def of_pipeline(spec: str, **options: bool) -> tuple[Compressor, Callable[[], object]]:
    stages = stages_of(dist.get_rank(), 2, ScheduleGPipe)
    state = compress_stages(stages, spec, **options)
    schedule, numbers = make_schedule(ScheduleGPipe, stages), itertools.count()

    def step() -> None:
        state.set_samples(range(len(stage_batch(0))))
        run_step(schedule, stages, stage_batch(next(numbers)))

    return state, step


DAMAGED: dict[str, Callable[[], tuple[Compressor, Callable[[], object]]]] = {
    "ddp": partial(of_ddp, "int4", feedback=True, guard=ddp.Guard(on_harm="warn")),
    "ddp, dgc": partial(of_ddp, "dgc:ratio=0.1"),
    "ddp, ef21": partial(of_ddp, "topk:ratio=0.1", feedback="ef21"),
    "ddp, powersgd": partial(of_ddp, "powersgd:rank=2"),
    "fsdp": partial(of_fsdp, "ef:int4", "delta:int8"),
    "fsdp, loco": partial(of_fsdp, "loco:int4", "none"),
    "sharded optimizer": partial(of_sharded_optimizer, "ef:int4"),
    "local sgd": partial(of_local_sgd, "int4"),
    "pipeline": partial(of_pipeline, "int4", feedback=True, differences=True),
}


def damaged(data: bytes) -> Iterator[bytes]:
    """Yield copies with a flipped bit, half of them near the beginning, where values and names are, and with zeros."""
    places = random.Random(len(data))
    for number in range(40):
        at = places.randrange(len(data) if number % 2 else min(len(data), 4096))
        yield data[:at] + bytes([data[at] ^ 1 << places.randrange(8)]) + data[at + 1 :]
    for _ in range(10):
        at = places.randrange(len(data) - 512)
        yield data[:at] + bytes(512) + data[at + 512 :]


def check_damage(rank: int, n: int, case: str) -> int:
    """Return how many damaged states were read by torch and refused; none of them may change the state."""
    state, step = DAMAGED[case]()
    step()
    saved = state.state_dict()
    packed = io.BytesIO()
    torch.save(saved, packed)
    step()
    other = state.state_dict()
    assert other["checksums"] != saved["checksums"]
    refused = 0
    for data in damaged(packed.getvalue()):
        try:
            read = torch.load(io.BytesIO(data), weights_only=True)
        except Exception:  # torch has noticed it
            continue
        try:
            state.load_state_dict(read)
        except ValueError as error:
            assert "state" in str(error)
            assert state.state_dict()["checksums"] == other["checksums"], case
            refused += 1
        else:  # what is damaged has no meaning
            assert state.state_dict()["checksums"] == saved["checksums"], case
            state.load_state_dict(other)
    # Entries that are not valid are refused although their checksums are right.
    for name in saved.keys() - {"version", "unused", "checksums"}:
        for entry in (None, -5, "text", {"w": torch.full((4,), math.nan)}):
            if (name, entry) in (("seed", -5), ("loss_scale", None)) or (
                case[:4] == "fsdp" and name == "references"
            ):
                continue
            with pytest.raises(ValueError, match=name if name != "compression" else ""):
                state.load_state_dict(seal({**saved, name: entry}))
            assert state.state_dict()["checksums"] == other["checksums"], (case, name, entry)
    state.load_state_dict(saved)
    assert state.state_dict()["checksums"] == saved["checksums"]
    return refused


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_states_are_refused_and_change_nothing(case: str) -> None:
    assert min(run_ranks(check_damage, 2, case)) >= 10
