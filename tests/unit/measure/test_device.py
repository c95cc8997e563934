"""The description of a GPU, and the memory floor of kernels."""

from __future__ import annotations

import pytest
import torch

from bench.common.memory_floor import KernelWorkloads, TimedCopy, buffer_sets_for
from dtcomm import measure as device_info
from dtcomm.codecs import codec
from dtcomm.measure import HostClock


def test_versions_of_the_libraries() -> None:
    versions = device_info.versions()
    assert versions["torch"] == torch.__version__ and versions["dtcomm"] and versions["python"]
    assert versions["cuda"] == torch.version.cuda


def test_a_copy_s_rate_is_the_median_s() -> None:
    # Pairs of begin and end: 1, 3 and 2 seconds, then 4.
    now = iter([0.0, 1.0, 0.0, 3.0, 0.0, 2.0, 0.0, 4.0]).__next__
    copy = TimedCopy(torch.device("cpu"), HostClock(now), nbytes=1000)
    copy.time(3)
    assert copy.bytes_per_second(reset=True) == pytest.approx(2 * 1000 / 2)
    copy.time()
    assert copy.bytes_per_second() == pytest.approx(2 * 1000 / 4)


@pytest.mark.parametrize("spec", ["int8", "topk:ratio=0.1", "none"])
def test_workloads_count_the_bytes_of_their_verbs(spec: str) -> None:
    numel, layout = 3000, codec(spec)
    workloads = KernelWorkloads(layout, numel, 2, torch.device("cpu"))
    wire = layout.wire_bytes(numel)
    bytes_moved = {}
    for workload in (workloads.encode(), workloads.decode(), *workloads.reductions()):
        for turn in range(workloads.sets):
            workload.run(turn)
        bytes_moved[workload.name] = workload.bytes_moved
    one, eight = 4 * numel + wire, 4 * numel + 8 * wire
    reductions = {"reduce 8": eight, "reduce_encode 7 + local": eight}
    assert bytes_moved == {
        "encode": one,
        "decode": one,
        **reductions,
        "encode with residual": one + 8 * numel,
    }
    assert buffer_sets_for(1 << 28) == 2 and buffer_sets_for(1) == 8
