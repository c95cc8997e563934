"""dtcomm.run: a user's schedule is verified, then run, or refused with its rank, step and chunk."""

from __future__ import annotations

import pytest
import torch

from dtcomm import algorithms, collectives
from dtcomm.errors import CollectiveMismatch, ScheduleError
from dtcomm.schedule import parse
from tests.support.rank_tests import on_ranks

RELAY = """all_reduce ranks=3 chunks=2
rank 0 | c0+1 | .      | c1=1,2
rank 1 | c1+0 | c0+2   | .
rank 2 | c1+0 | .      | c0=0,1"""
TWICE = "all_reduce ranks=3 chunks=1\nrank 0|.|c0=1|.|.\nrank 1|c0+2|.|.|c0=0,2\nrank 2|.|.|c0+1|."
LACKS = "all_reduce ranks=3 chunks=1\nrank 0 | c0+1 | .\nrank 1 | .    | c0=0,2\nrank 2 | .    | ."


@on_ranks(3)
def test_valid_schedules_run_and_invalid_ones_are_refused(rank: int, n: int) -> None:
    for spec in ("none", "int8"):
        tensor = torch.full((3000,), float(rank + 1))
        for _ in range(2):  # verified only the first time
            tensor.fill_(rank + 1)
            collectives.run(RELAY, tensor, codec=spec)
            assert torch.allclose(tensor, torch.full((3000,), 6.0), atol=0.1)
    mean = torch.full((10,), float(rank))
    work = collectives.run(parse(RELAY), mean, op="avg", residual=torch.zeros(10), async_op=True)
    work.wait()
    assert mean.eq(1).all()
    for collective in algorithms.collectives():
        schedule = algorithms.build(
            "tree", collective, n, root=1 if collective in ("gather", "scatter") else 0
        )
        shards = torch.arange(float(4 * n)) + 100 * rank
        output = torch.empty(4 * n)
        match collective:
            case "all_reduce" | "broadcast" | "reduce":
                collectives.run(schedule, shards)
            case "reduce_scatter":
                collectives.run(schedule, output[:4], shards)
            case "all_gather":
                collectives.run(schedule, output, shards[:4])
                assert output[4].item() == 100
            case "gather":
                collectives.run(schedule, output if rank == 1 else None, shards[:4])
            case "scatter":
                collectives.run(schedule, output[:4], shards if rank == 1 else None)
                assert output[0].item() == 100 + 4 * rank
            case _:
                collectives.run(schedule, output, shards)
                assert output[::4].tolist() == [100.0 * src + 4 * rank for src in range(n)]
    with pytest.raises(
        ScheduleError, match="rank 0 step 1 chunk 0: the output lacks the contribution of rank 2"
    ):
        collectives.run(LACKS, torch.ones(3))
    with pytest.raises(ScheduleError, match=r"rank 1 step 0: expected a send like 'c0\+1'"):
        collectives.run("all_reduce ranks=2 chunks=1\nrank 0 | c0+1\nrank 1 | oops", torch.ones(3))
    with pytest.raises(ValueError, match="schedule: is for 2 ranks, the group has 3"):
        collectives.run(algorithms.build("ring", "all_reduce", 2), torch.ones(3))
    with pytest.raises(TypeError, match="schedule: expected a Schedule or its text, got int"):
        collectives.run(3, torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="residual: rank 1 encodes chunk 0 2 times"):
        collectives.run(TWICE, torch.ones(3), residual=torch.zeros(3))
    with pytest.raises(ValueError, match="input: all_reduce works on tensor in place"):
        collectives.run(RELAY, torch.ones(3), torch.ones(3))
    with pytest.raises(CollectiveMismatch, match="schedule "):
        collectives.run(TWICE if rank == 0 else RELAY, torch.ones(3))
