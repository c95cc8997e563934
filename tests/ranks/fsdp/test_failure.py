"""A rank dies while a sharded model trains: all others name it, in this step and the next."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh

from dtcomm import fsdp
from dtcomm.errors import PeerLost
from dtcomm.fsdp.collectives import CompressedAllGather, CompressedReduceScatter
from dtcomm.launch.ranks import spawn_ranks
from tests.ranks.fsdp.models import WIDTH, sharded
from tests.ranks.fsdp.restarted import main
from tests.support.elastic_ranks import WORKERS_OWN_STORE, run_elastic
from tests.support.stopwatch import Elapsed, Stopwatch

VICTIM = 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(model: Any, moment: str) -> None:
    """Make this rank die in a collective of `blocks.1` that the others have started, or between two collectives."""
    if moment == "between":
        # The forward pass has gathered; the other ranks continue with backward's reduce-scatter.
        model.blocks[1].down.register_forward_hook(lambda *_: die())
        return
    collective = CompressedAllGather if moment == "all-gather" else CompressedReduceScatter
    call = collective.__call__

    def call_and_die(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.module == "blocks.1":
            time.sleep(0.1)
            die()
        return call(self, *arguments, **options)

    collective.__call__ = call_and_die  # type: ignore[method-assign, assignment]


def train(rank: int, ranks: int, moment: str, codecs: dict[str, str]) -> tuple[str, Elapsed, str]:
    """Return the error, the seconds until it was raised, and the error of the next step."""
    model: nn.Module = sharded(init_device_mesh("cpu", (ranks,)), reshard_after_forward=False)
    fsdp.compress(model, **codecs)

    def step() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    if rank == VICTIM:
        arm(model, moment)
    watch = Stopwatch()
    with pytest.raises(PeerLost) as first:
        for _ in range(3):
            step()
    elapsed = watch.elapsed()
    with pytest.raises(PeerLost) as second:
        step()
    return str(first.value), elapsed, str(second.value)


@pytest.mark.parametrize("moment", ["all-gather", "reduce-scatter", "between"])
def test_every_survivor_names_the_dead_rank(moment: str) -> None:
    codecs = {"gradients": "loco:int4", "parameters": "fp8_e4m3"}
    with spawn_ranks(train, 3, moment, codecs) as ranks:
        pid = ranks.pids[VICTIM]
        outcomes = ranks.join(30)
    assert outcomes[VICTIM].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, str(outcome)
        first_error, elapsed, second_error = outcome.result
        assert f"rank {VICTIM}" in first_error and str(pid) in first_error
        assert elapsed.within(cpu_s=3.0, wall_s=15.0), elapsed
        assert f"rank {VICTIM}" in second_error


ARGUMENTS = ["--gradients", "loco:int4", "--parameters", "delta:int4", "--save-every", "2", "--steps", "6"]


def contents(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, read without a process group."""
    metadata = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else b""
        for name, entry in metadata.items()
    }
    checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.slow
def test_torchrun_restarts_from_the_checkpoint_like_a_resumed_run(tmp_path: Path) -> None:
    run_folder, resumed_folder = tmp_path / "run", tmp_path / "again"
    run_elastic(main, 2, 3, [*ARGUMENTS, "--checkpoints", str(run_folder)], restarts=1, env=WORKERS_OWN_STORE)
    assert (tmp_path / "deaths").read_text() == "rank 1\n"
    shutil.copytree(run_folder / "2", resumed_folder / "2")
    run_elastic(main, 2, 99, [*ARGUMENTS, "--checkpoints", str(resumed_folder)])
    restarted, expected = contents(run_folder / "6"), contents(resumed_folder / "6")
    assert restarted.keys() == expected.keys() and len(restarted) > 20
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(restarted[name], value), name
