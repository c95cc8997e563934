"""Algorithms of the user's, registered under a name or passed as a Schedule, in the calls that take ``algorithm``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm import algorithms, collectives
from dtcomm.errors import CollectiveMismatch, ScheduleError
from dtcomm.launch.ranks import run_ranks
from dtcomm.schedule import Builder, Schedule, Transfer
from tests.support.rank_tests import on_ranks

TWICE = "all_reduce ranks=3 chunks=1\nrank 0|.|c0=1|.|.\nrank 1|c0+2|.|.|c0=0,2\nrank 2|.|.|c0+1|."


def star(ranks: int, centre: int = 0) -> Schedule:
    """All ranks add to the one in the centre, which copies the sum to all."""
    others = [rank for rank in range(ranks) if rank != centre]
    builder = Builder("all_reduce", ranks, chunks=1)
    for rank in others:
        builder.chunk(0).at(rank).reduce_to(centre)
    if others:
        builder.chunk(0).at(centre).copy_to(*others)
    return builder.build()


def of_tree(collective: str, ranks: int, root: int = 0) -> Schedule:
    return algorithms.build("tree", collective, ranks, root)


def lacks_rank_1(ranks: int) -> Schedule:
    transfers = [Transfer(0, 2, 0, 0, "reduce"), *(Transfer(1, 0, rank, 0, "copy") for rank in (1, 2))]
    return Schedule(collective="all_reduce", ranks=ranks, chunks=1, transfers=tuple(transfers))


def last_algorithms() -> list[str]:
    """Return the algorithms of the operations in the flight record, the last operation last."""
    communicators = collectives.flight_record()["communicators"]
    return [entry["algorithm"] for communicator in communicators for entry in communicator["operations"]]


def register_all(n: int) -> None:
    algorithms.register("star", "all_reduce", star)
    for collective in algorithms.collectives():
        if collective in ("broadcast", "reduce", "gather", "scatter"):
            algorithms.register("mine", collective, lambda ranks, root, c=collective: of_tree(c, ranks, root))
        else:
            algorithms.register("mine", collective, lambda ranks, c=collective: of_tree(c, ranks))


@on_ranks(3, fresh=True)
def test_own_algorithms_run_in_every_collective(rank: int, n: int) -> None:
    register_all(n)
    for collective in algorithms.collectives():
        root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else 0
        schedule = of_tree(collective, n, root)
        for algorithm in ("mine", schedule, str(schedule), "hierarchical:mine/mine"):
            if str(algorithm).startswith("hierarchical") and collective in (
                "gather",
                "scatter",
                "all_to_all",
            ):
                continue
            shards = torch.arange(float(4 * n)) + 100 * rank
            output = torch.zeros(4 * n)
            match collective:
                case "all_reduce":
                    collectives.all_reduce(shards, algorithm=algorithm)
                    assert shards[1] == n + 100 * sum(range(n))
                case "broadcast":
                    collectives.broadcast(shards, 1, algorithm=algorithm)
                    assert shards[1] == 101
                case "reduce":
                    collectives.reduce(shards, 1, algorithm=algorithm)
                    assert rank != 1 or shards[1] == n + 100 * sum(range(n))
                case "reduce_scatter":
                    collectives.reduce_scatter(output[:4], shards, algorithm=algorithm)
                    assert output[0] == 4 * rank * n + 100 * sum(range(n))
                case "all_gather":
                    collectives.all_gather(output, shards[:4], algorithm=algorithm)
                    assert output[::4].tolist() == [100.0 * src for src in range(n)]
                case "gather":
                    collectives.gather(shards[:4], output if rank == 1 else None, 1, algorithm=algorithm)
                    assert rank != 1 or output[::4].tolist() == [100.0 * src for src in range(n)]
                case "scatter":
                    collectives.scatter(output[:4], shards if rank == 1 else None, 1, algorithm=algorithm)
                    assert output[0] == 100 + 4 * rank
                case _:
                    collectives.all_to_all(output, shards, algorithm=algorithm)
                    assert output[::4].tolist() == [100.0 * src + 4 * rank for src in range(n)]
            label = "mine (schedule " if algorithm == "mine" else "schedule "
            if not str(algorithm).startswith("hierarchical"):
                assert last_algorithms()[-1].startswith(label)
    tensors = [torch.full((10,), float(rank)), torch.full((3,), 1.0)]
    collectives.all_reduce_coalesced(tensors, algorithm=star(n), codec="int8")
    assert tensors[1].allclose(torch.full((3,), float(n)), atol=0.1)


@on_ranks(3, fresh=True)
def test_what_is_wrong_is_named_where_it_is_given(rank: int, n: int) -> None:
    algorithms.register("star", "all_reduce", star)
    algorithms.register("lacks", "all_reduce", lacks_rank_1)
    algorithms.register("differs", "all_reduce", lambda ranks: star(ranks, centre=rank and 1))
    x = torch.ones(8)
    calls = [
        (ValueError, "algorithm: 'stars' is not one of auto, .*two_shot, star, lacks, differs", "stars"),
        (ScheduleError, "algorithm 'lacks', 3 ranks: rank 0 step 0 chunk 0: the output lacks .* rank 1", "lacks"),
        (ScheduleError, "rank 0 step 0 chunk 0: the output lacks", lacks_rank_1(n)),
        (ValueError, "algorithm: the schedule is for 2 ranks, the group has 3", star(2)),
        (ValueError, "algorithm: the schedule is for reduce, not all_reduce", of_tree("reduce", n)),
        (TypeError, "algorithm: expected a name or a Schedule, got int", 3),
    ]  # fmt: skip
    for _ in range(2):  # while the ranks connect, and after that
        with pytest.raises(ValueError, match="residual: rank 1 encodes chunk 0 2 times in schedule"):
            collectives.all_reduce(x, algorithm=TWICE, residual=torch.zeros(8), async_op=True).wait()
        collectives.barrier()
    for asynchronous in (True, False):
        for kind, message, algorithm in calls:
            with pytest.raises(kind, match=message):
                collectives.all_reduce(x, algorithm=algorithm, async_op=asynchronous)  # type: ignore[call-overload]
        with pytest.raises(
            ValueError, match="algorithm: the schedule's root is rank 1 of the group, the call's"
        ):
            collectives.broadcast(x, 0, algorithm=of_tree("broadcast", n, 1), async_op=asynchronous)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="residual: rank 1 encodes chunk 0 2 times in schedule"):
        collectives.all_reduce(x, algorithm=TWICE, residual=torch.zeros(8))
    residual = torch.zeros(8)
    collectives.all_reduce(x, algorithm="star", codec="int4", residual=residual)
    assert x.allclose(torch.full((8,), float(n)), atol=0.5)


@pytest.mark.parametrize("kind", ["name", "schedule"])
@on_ranks(2, fresh=True)
def test_ranks_whose_schedules_differ_raise_mismatch(rank: int, n: int, kind: str) -> None:
    algorithms.register("differs", "all_reduce", lambda ranks: star(ranks, centre=rank))
    algorithm = "differs" if kind == "name" else star(n, centre=rank)
    with pytest.raises(CollectiveMismatch, match=r"schedule [0-9a-f]{8}"):
        collectives.all_reduce(torch.ones(8), algorithm=algorithm)


def train(rank: int, n: int) -> None:
    algorithms.register("star", "all_reduce", star)
    gradients = []
    for algorithm in ("direct", "star", star(n)):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(256, 64))
        state = dtcomm.ddp.compress(model, "int8", algorithm=algorithm)
        for step in range(2):
            model.zero_grad()
            model(torch.full((4, 256), float(rank + step))).square().mean().backward()
        gradients.append(model.module.weight.grad)
        report = state.report()
        assert 0 < report.wire_bytes < 0.3 * report.plain_bytes
    assert gradients[1].allclose(gradients[0], rtol=0.05, atol=0.05 * gradients[0].abs().max().item())
    assert gradients[1].equal(gradients[2])
    assert any(name.startswith("star (schedule ") for name in last_algorithms())
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="algorithm: the schedule is for 2 ranks, the group has 3"):
        dtcomm.ddp.compress(model, "int8", algorithm=star(2))
    with pytest.raises(ValueError, match="algorithm: 'stars' is not one of auto, direct"):
        dtcomm.ddp.compress(model, "int8", algorithm="stars")
    with pytest.raises(
        ValueError, match="names a codec for each level, and this Schedule has no levels; valid"
    ):
        dtcomm.ddp.compress(model, "int8/int4", algorithm=star(n))
    local = dtcomm.local_sgd.LocalSGD(torch.nn.Linear(4, 4), every=1, algorithm=star(n))
    local.step()


def test_ddp_trains_with_an_own_algorithm() -> None:
    run_ranks(train, 3, fresh=True)


@on_ranks(3, fresh=True)
def test_tensor_parallel_layers_take_an_own_algorithm(rank: int, n: int) -> None:
    algorithms.register("star", "all_reduce", star)
    results = []
    for algorithm in ("direct", "star", star(n)):
        torch.manual_seed(0)
        layer = dtcomm.tp.RowParallelLinear(12, 6, codec="int8", algorithm=algorithm, latency=False)
        results.append(layer(torch.ones(2, 4)).detach())
    assert results[1].allclose(results[0], atol=0.1) and results[1].equal(results[2])
    x = torch.ones(4)
    comm = dtcomm.tp.CommConfig.of("int8", algorithm=star(n), latency=False)
    compiled = torch.compile(lambda x: dtcomm.tp.functional.reduce_from_ranks(x, comm), backend="eager")
    assert compiled(x).allclose(torch.full((4,), float(n)), atol=0.1)
    with pytest.raises(ValueError, match="algorithm: the schedule is for 2 ranks, the group has 3"):
        dtcomm.tp.RowParallelLinear(12, 6, algorithm=star(2))


def fsdp(rank: int, n: int, kind: str) -> None:
    for collective in ("reduce_scatter", "all_gather"):
        algorithms.register("mine", collective, lambda ranks, c=collective: of_tree(c, ranks))
    mesh = init_device_mesh("cpu", (n,))
    model: Any
    losses = {}
    for name in ("auto", "mine"):
        torch.manual_seed(0)
        if kind == "FSDP2":
            model = fully_shard(torch.nn.Linear(64, 64), mesh=mesh)
            codecs = {"gradients": "int8", "parameters": "int8"}
        else:
            model = FullyShardedDataParallel(torch.nn.Linear(64, 64), device_id=torch.device("cpu"))
            codecs = {"gradients": "int8"}
        state = dtcomm.fsdp.compress(model, algorithm=name, **codecs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            loss = model(torch.full((4, 64), 0.1 * (rank + 1))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = loss.item()
    assert losses["mine"] == pytest.approx(losses["auto"], rel=0.05)
    used = [name for name in last_algorithms() if name.startswith("mine (schedule ")]
    assert len(set(used)) == (2 if kind == "FSDP2" else 1)
    state.detach()
    for algorithm, message in (
        (
            "stars",
            "algorithm: 'stars' is not one of auto, direct, .*, mine, hierarchical, which reduce_scatter has",
        ),
        ("two_shot", "algorithm: 'two_shot' is not one of auto, direct, .* which reduce_scatter has"),
    ):
        with pytest.raises(ValueError, match=message):
            dtcomm.fsdp.compress(model, algorithm=algorithm)
    if kind == "FSDP2":
        with pytest.raises(ValueError, match="algorithm: the schedule is for reduce_scatter, not all_gather"):
            dtcomm.fsdp.compress(model, algorithm=of_tree("reduce_scatter", n))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["FSDP2", "FSDP1"])
def test_fsdp_trains_with_an_own_algorithm(kind: str) -> None:
    run_ranks(fsdp, 3, kind, fresh=True)


def on_the_backend(rank: int, n: int, folder: str) -> None:
    algorithms.register("star", "all_reduce", star)
    dist.barrier()  # Gloo fails on a rank that still connects to one that destroys its group
    dist.destroy_process_group()
    dist.init_process_group("dtcomm", init_method=f"file://{folder}/store", rank=rank, world_size=n)
    tensor = torch.full((256,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.eq(3).all()
    assert last_algorithms()[-1].startswith("star (schedule ")


def test_the_backend_takes_an_own_algorithm_that_was_measured(tmp_path: Path) -> None:
    table = tmp_path / "tune.json"
    points = {"collective": "all_reduce", "codec": "none", "ranks": 3, "hosts": 1}
    rows = [
        {**points, "algorithm": name, "points": [[1024, seconds]]}
        for name, seconds in (("star", 1), ("ring", 99))
    ]
    document = dtcomm.planner.cost_model.Table(source="a test").as_dict()
    table.write_text(json.dumps({**document, "measured": rows}))
    run_ranks(on_the_backend, 3, str(tmp_path), fresh=True, env={"DTCOMM_TUNE": str(table)})
