"""The memory of a step beside DDP's own: the residual, and at most one encoded copy of a bucket."""

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
SLACK = 1.5 * 2**20  # what the allocator keeps, threads' stacks, pieces in flight


def peak_increase(steps: Callable[[], None]) -> int:
    """Return by how many bytes the peak of resident memory during the steps exceeds the memory before them."""
    steps()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak()
    steps()
    return _peak() - before


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def extra_bytes(rank: int, world_size: int, spec: str, feedback: bool) -> int:
    """Return how many bytes more compressed steps take than plain ones."""
    # Freed memory is returned at once; otherwise the allocator's caching is measured.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
    torch.set_num_threads(1)
    x = torch.randn(1, SIDE)
    increases = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(SIDE, SIDE, bias=False))
        if compressed:
            state = ddp.compress(model, spec, feedback=feedback, guard=None, sample_every=0)

        def steps(model: nn.Module = model) -> None:
            for _ in range(3):
                model(x).sum().backward()

        increases.append(peak_increase(steps))
    assert state.report().residual_bytes == (4 * SIDE * SIDE if feedback else 0)
    return increases[1] - increases[0]


@pytest.mark.parametrize("runtime", ["native", "process_group"])
def test_memory_is_the_residual_and_at_most_one_encoded_copy(runtime: str) -> None:
    """The residual stays and the report counts it; everything else is allocated while a bucket is in flight."""
    bound = codec("int8").wire_bytes(SIDE * SIDE) + SLACK
    # Fresh processes, because free memory in the allocator's arenas would change the result.
    for more in run_ranks(extra_bytes, 2, "int8", True, env={"DTCOMM_RUNTIME": runtime}, fresh=True):
        assert more <= bound, f"{more / 2**20:.2f} MiB, {bound / 2**20:.2f} expected at most"
