"""A rank dies while a sharded model trains: all others name it, in this step and the next."""

from __future__ import annotations

import os
import runpy
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
from dtcomm.launch.ranks import WORKERS_OWN_STORE, run_elastic, run_ranks, spawn_ranks
from tests.ranks.fsdp.models import WIDTH, sharded
from tests.ranks.fsdp.restarted import main
from tests.support.stopwatch import Elapsed, Stopwatch

ROOT = Path(__file__).parents[3]
VICTIM = 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(model: Any, where: str) -> None:
    """Make this rank die in a collective of `blocks.1` that the others have started, or between two collectives."""
    if where == "between":
        # The forward pass has gathered; the other ranks continue with backward's reduce-scatter.
        model.blocks[1].down.register_forward_hook(lambda *_: die())
        return
    kind = CompressedAllGather if where == "all-gather" else CompressedReduceScatter
    call = kind.__call__

    def deadly(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.module == "blocks.1":
            time.sleep(0.1)
            die()
        return call(self, *arguments, **named)

    kind.__call__ = deadly  # type: ignore[method-assign, assignment]


def train(rank: int, ranks: int, where: str, codecs: dict[str, str]) -> tuple[str, Elapsed, str]:
    """Return the error, the seconds until it was raised, and the error of the next step."""
    model: nn.Module = sharded(init_device_mesh("cpu", (ranks,)), reshard_after_forward=False)
    fsdp.compress(model, **codecs)

    def step() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    if rank == VICTIM:
        arm(model, where)
    watch = Stopwatch()
    with pytest.raises(PeerLost) as first:
        for _ in range(3):
            step()
    elapsed = watch.elapsed()
    with pytest.raises(PeerLost) as second:
        step()
    return str(first.value), elapsed, str(second.value)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["all-gather", "reduce-scatter", "between"])
def test_a_dead_rank_is_named_by_all_others(where: str) -> None:
    codecs = {"gradients": "loco:int4", "parameters": "fp8_e4m3"}
    with spawn_ranks(train, 3, where, codecs) as ranks:
        pid = ranks.pids[VICTIM]
        outcomes = ranks.join(30)
    assert outcomes[VICTIM].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome
        text, elapsed, again = outcome.result
        assert f"rank {VICTIM}" in text and str(pid) in text
        assert elapsed.within(cpu_s=3.0, wall_s=15.0), elapsed
        assert f"rank {VICTIM}" in again


ARGUMENTS = ["--preset", "sdp4bit", "--width", "32", "--layers", "2", "--save-every", "2", "--steps", "6"]


def resumed(rank: int, ranks: int, folder: str) -> None:
    example = runpy.run_path(str(ROOT / "examples/fsdp_char_gpt.py"))
    example["train"](example["parse"]([*ARGUMENTS, "--checkpoints", folder]))


def contents(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, read without a process group."""
    metadata = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        name: torch.empty(about.size, dtype=about.properties.dtype) if hasattr(about, "size") else b""
        for name, about in metadata.items()
    }
    checkpoint.load(found, checkpoint_id=folder, no_dist=True)
    return found


@pytest.mark.slow
def test_torchrun_restarts_from_the_checkpoint_and_ends_as_a_resumed_run(tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    run_elastic(main, 2, 3, [*ARGUMENTS, "--checkpoints", str(run)], restarts=1, env=WORKERS_OWN_STORE)
    assert (tmp_path / "deaths").read_text() == "rank 1\n"
    shutil.copytree(run / "2", again / "2")
    run_ranks(resumed, 2, str(again))
    ended, expected = contents(run / "6"), contents(again / "6")
    assert ended.keys() == expected.keys() and len(ended) > 20
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ended[name], value), name
