"""The first operations on a group, which connect its ranks: asynchronous ones do not wait for that."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm.errors import CollectiveTimeout, DtcommError, PeerLost
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from dtcomm.work import Work
from tests.support.stopwatch import Stopwatch

RANKS = 4
SHARD = 1000


def subgroups() -> list[Any]:
    """Every group of two ranks, of which each rank is in three."""
    return [dist.new_group(pair) for pair in itertools.combinations(range(RANKS), 2)]


def use_subgroups_in_opposite_order(rank: int, world_size: int, entry_point: str) -> list[float]:
    """Return the sums of this rank's three groups."""
    groups = [group for group in subgroups() if group is not dist.GroupMember.NON_GROUP_MEMBER]
    tensors = [torch.full((SHARD,), float(rank + 1)) for _ in groups]
    works: dict[int, Any] = {}
    order = range(len(groups)) if rank % 2 else reversed(range(len(groups)))
    for index in order:
        if entry_point == "torch":
            works[index] = dist.all_reduce(tensors[index], group=groups[index], async_op=True)
        else:
            works[index] = C.all_reduce(tensors[index], group=groups[index], async_op=True)
    for work in works.values():
        work.wait()
    return [float(tensor[0]) for tensor in tensors]


@pytest.mark.parametrize(("backend", "entry_point"), [("dtcomm", "torch"), ("gloo", "dtcomm")])
def test_groups_are_first_used_in_any_order(backend: str, entry_point: str) -> None:
    results = run_ranks(use_subgroups_in_opposite_order, RANKS, entry_point, backend=backend)
    expected = [[float(rank + peer + 2) for peer in range(RANKS) if peer != rank] for rank in range(RANKS)]
    assert results == expected


Call = Callable[[Any, bool, list[torch.Tensor]], Work | None]

# Every collective, with codecs that depend on the number of the call, residuals, several stages and several messages.
CALLS: dict[str, Call] = {
    "all_reduce": lambda group, run, t: C.all_reduce(t[0], group=group, async_op=run),
    "stochastic": lambda group, run, t: C.all_reduce(
        t[0], "avg", codec="int4:round=stochastic", residual=t[1], group=group, async_op=run
    ),
    "exact": lambda group, run, t: C.all_reduce(t[0], codec="exact", audit=True, group=group, async_op=run),
    "shared positions": lambda group, run, t: C.all_reduce(
        t[0], codec="randk:ratio=0.1,positions=shared", residual=t[1], group=group, async_op=run
    ),
    "reduce": lambda group, run, t: C.reduce(t[0], 1, codec="int8", group=group, async_op=run),
    "reduce_scatter": lambda group, run, t: C.reduce_scatter(
        t[2], t[3], codec="int8", group=group, async_op=run
    ),
    "all_gather": lambda group, run, t: C.all_gather(t[3], t[2], codec="fp16", group=group, async_op=run),
    "broadcast": lambda group, run, t: C.broadcast(t[0], 1, codec="int8", group=group, async_op=run),
    "gather": lambda group, run, t: C.gather(
        t[2], list(t[3].split(SHARD)) if dist.get_rank() == 0 else None, 0, group=group, async_op=run
    ),
    "scatter": lambda group, run, t: C.scatter(
        t[2], list(t[3].split(SHARD)) if dist.get_rank() == 1 else None, 1, group=group, async_op=run
    ),
    "all_to_all": lambda group, run, t: C.all_to_all(t[4], t[3], codec="int8", group=group, async_op=run),
    "coalesced": lambda group, run, t: C.all_reduce_coalesced(
        [t[0], t[3], t[4]],
        codec=["int8", "none", "topk:ratio=0.1"],
        residuals=[t[1], None, None],
        bucket_bytes=8 * SHARD,
        group=group,
        async_op=run,
    ),
    "barrier": lambda group, run, t: C.barrier(group=group, async_op=run),
    "min": lambda group, run, t: C.all_reduce(t[0], "min", group=group, async_op=run),
}


def tensors_of(rank: int, call: int) -> list[torch.Tensor]:
    """A tensor, its residual, a shard, and two tensors of a shard for each rank."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    sizes = [3 * SHARD, 3 * SHARD, SHARD, 2 * SHARD, 2 * SHARD]
    return [torch.randn(size, generator=generator) for size in sizes]


def compare_with_connected_group(rank: int, world_size: int, order: list[str]) -> list[str]:
    """Return the calls that do not give the same bytes when they are deferred."""
    connected, fresh = dist.new_group([0, 1]), dist.new_group([0, 1])
    expected = [tensors_of(rank, call) for call in range(len(order))]
    for name, tensors in zip(order, expected, strict=True):
        CALLS[name](connected, False, tensors)
    actual = [tensors_of(rank, call) for call in range(len(order))]
    if rank == 1:
        dist.barrier()  # rank 0 has issued all of its operations
    works = [CALLS[name](fresh, True, tensors) for name, tensors in zip(order, actual, strict=True)]
    futures = [work.get_future() for work in works if work is not None]
    if rank == 0:
        assert not any(work.is_completed() for work in works if work is not None)
        dist.barrier()
    C.barrier(group=fresh)  # synchronous, so behind all of them
    for work in reversed(works):
        assert work is not None
        work.wait()
        assert work.is_completed()
    for future in futures:
        future.wait()
    return [
        f"{call}: {name}"
        for call, name in enumerate(order)
        if not all(map(torch.equal, expected[call], actual[call]))
    ]


def test_deferred_operations_give_the_same_bytes() -> None:
    order = [*CALLS, *reversed(CALLS)]
    assert run_ranks(compare_with_connected_group, 2, order) == [[], []]


def reduce_parameters(rank: int, world_size: int) -> list[float]:
    """Sum a parameter and a tensor of inference mode, in place, as first operations on two groups."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    parameter = torch.nn.Parameter(torch.full((5,), rank + 1.0))
    with torch.no_grad():
        works = [C.all_reduce(parameter, group=first, async_op=True)]
    with torch.inference_mode():
        tensor = torch.full((5,), rank + 1.0)
        works.append(C.all_reduce(tensor, group=second, async_op=True))
    for work in works:
        work.wait()
    return [float(parameter[0]), float(tensor[0])]


@pytest.mark.parametrize("runtime", ["native", "process_group"])
def test_parameters_and_inference_tensors(runtime: str) -> None:
    assert run_ranks(reduce_parameters, 2, env={"DTCOMM_RUNTIME": runtime}) == [[3.0, 3.0]] * 2


def send_before_the_peer_comes(rank: int, world_size: int) -> list[float]:
    """Two messages in each direction and a collective are issued before the other rank issues any."""
    peer = 1 - rank
    sent = [torch.full((SHARD,), float(10 * rank + message)) for message in range(2)]
    received = [torch.empty(SHARD) for _ in range(2)]
    if rank == 1:
        dist.barrier()
    works = [C.send(tensor, peer, async_op=True) for tensor in sent]
    works += [C.recv(tensor, peer, async_op=True) for tensor in received]
    total = torch.ones(1)
    works.append(C.all_reduce(total, async_op=True))
    if rank == 0:
        dist.barrier()
    for work in works:
        work.wait()
    return [*(float(tensor[0]) for tensor in received), float(total)]


def test_messages_are_deferred_too() -> None:
    assert run_ranks(send_before_the_peer_comes, 2) == [[10.0, 11.0, 2.0], [0.0, 1.0, 2.0]]


def refuse_wrong_arguments_at_once(rank: int, world_size: int) -> list[str]:
    """Return the errors of wrong calls on a group that is not connected; no other rank takes part."""
    group = dist.new_group([0, 1])
    errors = []
    if rank == 0:
        wrong: list[Callable[[], object]] = [
            lambda: C.all_reduce(torch.ones(1), "product", group=group, async_op=True),
            lambda: C.all_reduce(torch.ones(1), codec="int9", group=group, async_op=True),
            lambda: C.all_reduce(torch.ones(1), algorithm="rings", group=group, async_op=True),
            lambda: C.all_reduce(torch.ones(1, dtype=torch.int32), codec="int8", group=group, async_op=True),
            lambda: C.all_gather(torch.ones(3), torch.ones(1), group=group, async_op=True),
            lambda: C.broadcast(torch.ones(1), 7, group=group, async_op=True),
        ]
        for call in wrong:
            with pytest.raises((TypeError, ValueError)) as error:
                call()
            errors.append(str(error.value).partition(":")[0])
    dist.barrier()
    tensor = torch.ones(1)
    C.all_reduce(tensor, group=group)
    return [*errors, str(float(tensor))]


def test_wrong_arguments_are_refused_at_once() -> None:
    results = run_ranks(refuse_wrong_arguments_at_once, 2)
    assert results == [["op", "codec", "algorithm", "tensor", "output", "src", "2.0"], ["2.0"]]


def wait_for_late_ranks(rank: int, world_size: int) -> list[str]:
    """Return what the handle, the future and a callback of rank 0 say of ranks that did not come."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
    errors: list[str] = []
    if rank == 0:
        watch = Stopwatch()
        works = [C.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(2)]
        future = works[1].get_future()
        assert watch.elapsed().within(cpu_s=1.0, wall_s=1.9), "the calls waited"
        for wait in (works[0].wait, works[1].wait, future.wait):
            with pytest.raises(DtcommError) as error:
                wait()
            assert isinstance(error.value, CollectiveTimeout) or wait == future.wait
            errors.append(str(error.value))
        assert watch.elapsed().within(cpu_s=1.0, wall_s=3.8)
        assert all(work.is_completed() for work in works)
    dist.barrier()
    tensor = torch.ones(1)
    work = C.all_reduce(tensor, group=group, async_op=True)  # the group can be used again
    work.wait()
    return [*errors, str(float(tensor))]


def test_late_ranks_are_named_by_handles_and_futures() -> None:
    results = run_ranks(wait_for_late_ranks, 3)
    assert [result[-1] for result in results] == ["3.0"] * 3
    assert len(results[0]) == 4
    for text in results[0][:3]:
        assert "ranks 1 and 2 did not come" in text and "timeout of 2 s" in text


def issue_and_lose_a_rank(rank: int, world_size: int) -> str:
    group = dist.new_group([0, 1])
    C.barrier()  # from now on the ranks know each other's processes
    send_to_parent("ready")
    if rank == 1:
        time.sleep(60)
    work = C.all_reduce(torch.ones(1), group=group, async_op=True)
    with pytest.raises(PeerLost) as error:
        work.wait()
    return str(error.value)


def test_a_rank_that_dies_is_named() -> None:
    with spawn_ranks(issue_and_lose_a_rank, 2) as ranks:
        assert [ranks.receive(rank) for rank in range(2)] == ["ready"] * 2
        ranks.kill(1)
        outcome = ranks.join(40)[0]
    assert outcome.ok and outcome.result.startswith("rank 1 (") and "is gone" in outcome.result, outcome


def release_while_connecting(rank: int, world_size: int, how: str) -> list[str]:
    """Return the error of an operation whose group is given up before the other rank comes."""
    group = dist.new_group([0, 1])
    errors: list[str] = []
    if rank == 0:
        work = C.all_reduce(torch.ones(1), group=group, async_op=True)
        waiting = threading.Thread(target=lambda: errors.append(error_of(work)))
        waiting.start()
        watch = Stopwatch()
        C.release(group) if how == "release" else dist.destroy_process_group(group)
        C.release(dist.group.WORLD)  # closes the communicators of destroyed groups, too
        dist.barrier()
        C.barrier(async_op=True)
        waiting.join(20)
        assert watch.elapsed().within(cpu_s=1.0, wall_s=5.0)
    else:
        dist.barrier()
        C.barrier(async_op=True)
    if how == "release":
        tensor = torch.ones(1)
        C.all_reduce(tensor, group=group)
        errors.append(str(float(tensor)))
    C.barrier()
    return errors


def error_of(work: Work) -> str:
    with pytest.raises(DtcommError) as error:
        work.wait()
    return str(error.value)


@pytest.mark.parametrize("how", ["release", "destroy"])
def test_a_group_is_given_up_while_it_is_connected(how: str) -> None:
    released = "group: its communicators have been released"
    results = run_ranks(release_while_connecting, 2, how)
    assert results == ([[released, "2.0"], ["2.0"]] if how == "release" else [[released], []])


EXIT_PROGRAM = """
import sys
import torch, torch.distributed as dist
import dtcomm
rank = int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + sys.argv[2])
groups = [dist.new_group([0, 1]) for _ in range(3)]
if rank == 1:
    sys.stdin.read()
for group in groups:
    dtcomm.all_reduce(torch.ones(10), group=group, async_op=True)
    dtcomm.recv(torch.ones(10), 1, group=group, async_op=True)
sys.exit(3)
"""


def test_exit_while_connecting(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", EXIT_PROGRAM]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, errors = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == 3, errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
