"""A run monitor on real ranks: the axes of a mesh, and the rank that the others wait for."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dtcomm
from dtcomm.extensions.extras import RunMonitor
from dtcomm.launch.ranks import run_ranks
from dtcomm.profiling import prometheus
from tests.support.rank_tests import on_ranks

SLOW = 1


def train(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))
    monitor = RunMonitor(mesh, every=8, flops=1e9, peak=1e12)
    gradient = torch.ones(1000)
    for number in range(1, 17):
        time.sleep(0.06 if rank == SLOW else 0.01)
        for _ in range(2):
            dtcomm.all_reduce(gradient, "avg", group=mesh.get_group("dp"))
        monitor.step(gradient_norm=gradient.norm(), loss=1 / number)
    report = monitor.report()
    assert report.steps == 16
    assert report.mfu is not None and abs(report.mfu - 1e9 / report.step_s / 1e12) < 1e-9
    assert [(straggler.rank, straggler.cause) for straggler in report.stragglers] == [(SLOW, "slow compute")]
    assert [axis.axis for axis in report.axes] == ["dp"]
    (axis,) = report.axes
    assert axis.operations == 2  # in each step
    # The fast ranks wait for about 50 of 60 ms.
    assert (axis.share > 0.4) == (rank != SLOW), (rank, report)
    assert report.loss == 1 / 16 and report.gradient_norm == pytest.approx(1000**0.5)
    assert len(report.speeds) == ranks
    text = prometheus(monitor, {"rank": str(rank)})
    assert f'dtcomm_straggler_factor{{rank="{rank}",peer="0"}} 0\n' in text
    assert f'dtcomm_axis_communication_share{{rank="{rank}",axis="dp"}}' in text


def test_the_slow_rank_of_a_run_is_named() -> None:
    run_ranks(train, 3)


@on_ranks(2)
def test_more_operations_than_the_recorder_keeps(rank: int, ranks: int) -> None:
    """The recorder keeps 256 operations; what it forgot counts as long as what it kept."""
    monitor = RunMonitor(every=2)
    x = torch.ones(10)
    for _ in range(2):
        for _ in range(400):
            dtcomm.all_reduce(x, "avg")
        monitor.step()
    (axis,) = monitor.report().axes
    assert axis.operations == pytest.approx(400)  # in each step
    assert 0 < axis.share <= 1
