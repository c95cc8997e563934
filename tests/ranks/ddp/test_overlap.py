"""What a step takes of memory beside DDP's own: the residual, and at most one encoded copy of a bucket."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.codecs import codec
from dtcomm.launch.ranks import run_ranks

SIDE = 1536  # 9 MiB of one matrix, in a bucket of its own
M_MMAP_THRESHOLD = -3  # malloc.h
SLACK = 1.5 * 2**20  # what the allocator keeps, threads' stacks, pieces under way


def above(steps: Callable[[], None]) -> int:
    """By how much the most memory that was resident during the steps is above what was before, in bytes."""
    steps()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak()
    steps()
    return _peak() - before


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measured(rank: int, world_size: int, spec: str, feedback: bool) -> int:
    """What compressed steps take for a while, more than plain ones."""
    # What is freed is given back at once, or the allocator's habits are measured.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
    torch.set_num_threads(1)
    x = torch.randn(1, SIDE)
    taken = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(SIDE, SIDE, bias=False))
        if compressed:
            state = ddp.compress(model, spec, feedback=feedback, guard=None, sample_every=0)

        def steps(model: nn.Module = model) -> None:
            for _ in range(3):
                model(x).sum().backward()

        taken.append(above(steps))
    assert state.report().residual_bytes == (4 * SIDE * SIDE if feedback else 0)
    return taken[1] - taken[0]


@pytest.mark.parametrize("runtime", ["native", "process_group"])
def test_memory_is_the_residual_and_at_most_one_encoded_copy(runtime: str) -> None:
    """The residual stays, and the report counts it; everything else is there while a bucket is under way."""
    bound = codec("int8").wire_bytes(SIDE * SIDE) + SLACK
    # Fresh: what earlier tests left free in the allocator's arenas is not there to hide or to add anything.
    for more in run_ranks(measured, 2, "int8", True, env={"DTCOMM_RUNTIME": runtime}, fresh=True):
        assert more <= bound, f"{more / 2**20:.2f} MiB, {bound / 2**20:.2f} expected at most"
