"""Calls that repeat earlier ones take the short way, with the results, checks and errors of the long way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import dtcomm
from dtcomm.errors import CollectiveMismatch, PeerLost
from dtcomm.kernels.epilogue import epilogue_task
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime import plans
from dtcomm.runtime.communicator import Communicator
from tests.support.rank_tests import on_ranks

RUNS = 5
NUMEL = 96  # divisible by 2 and 3

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no C functions that read tensors (torch 2.10 or newer has)",
)

Call = Callable[..., Any]


def calls(rank: int, ranks: int) -> dict[str, tuple[Call, int, int]]:
    """Each collective as a function of (input, output), with the elements of its input and output on this rank."""
    root, shard = ranks - 1, NUMEL // ranks
    only_root = NUMEL if rank == root else 0
    return {
        "all_reduce": (lambda i, o, **k: dtcomm.all_reduce(o.copy_(i), **k), NUMEL, NUMEL),
        "reduce": (lambda i, o, **k: dtcomm.reduce(o.copy_(i), root, **k), NUMEL, NUMEL),
        "broadcast": (lambda i, o, **k: dtcomm.broadcast(o.copy_(i), root, **k), NUMEL, NUMEL),
        "reduce_scatter": (lambda i, o, **k: dtcomm.reduce_scatter(o, i, **k), NUMEL, shard),
        "all_gather": (lambda i, o, **k: dtcomm.all_gather(o, i, **k), shard, NUMEL),
        "all_to_all": (lambda i, o, **k: dtcomm.all_to_all(o, i, **k), NUMEL, NUMEL),
        "gather": (
            lambda i, o, **k: dtcomm.gather(i, o if rank == root else None, root, **k),
            shard,
            only_root,
        ),
        "scatter": (
            lambda i, o, **k: dtcomm.scatter(o, i if rank == root else None, root, **k),
            only_root,
            shard,
        ),
        "send and recv": (lambda i, o, **k: message(rank, ranks, i, o, **k), NUMEL, NUMEL),
    }


def message(rank: int, ranks: int, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Any:
    """A message from the first rank to the last."""
    if rank == 0:
        return dtcomm.send(x, ranks - 1, **options)
    if rank == ranks - 1:
        options.pop("seed", None)
        return dtcomm.recv(y, 0, **options)
    return None


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(("ranks", "codec"), [(2, "none"), (3, "int4:round=stochastic")])
@on_ranks()
def test_results_are_those_of_the_long_way(rank: int, ranks: int, codec: str, async_op: bool) -> None:
    """Calls give the same bytes whether they repeat an earlier one, or nothing is kept of earlier calls."""
    dtype = torch.int64 if codec == "none" and async_op else torch.float32
    # Each group numbers its calls, and the numbers are seeds as well.
    groups = {forget: dist.new_group() for forget in (True, False)}
    for name, (call, *numel) in calls(rank, ranks).items():
        for extras in (False, True):
            long, short = (
                outcomes(
                    rank,
                    call,
                    name,
                    {"group": group, "codec": codec, "async_op": async_op},
                    extras,
                    dtype,
                    numel,
                    forget,
                )
                for forget, group in groups.items()
            )
            for run, (expected, result) in enumerate(zip(long, short, strict=True)):
                assert all(map(torch.equal, expected, result)), (name, extras, run)


def outcomes(
    rank: int,
    call: Call,
    name: str,
    options: dict[str, Any],
    extras: bool,
    dtype: torch.dtype,
    numel: list[int],
    forget: bool,
) -> list[list[torch.Tensor]]:
    """Output and residual of each of several calls.

    With ``extras`` the calls have a seed, a checksum and, where the codec loses something, a residual.
    """
    residual = torch.zeros(numel[0])
    if (
        extras
        and options["codec"] != "none"
        and name in ("all_reduce", "reduce", "reduce_scatter", "all_gather")
    ):
        options["residual"] = residual
    results = []
    for run in range(1, RUNS + 1):
        generator = torch.Generator().manual_seed(100 * run + rank)
        x = (torch.randn(numel[0], generator=generator) * 100).to(dtype)
        output = torch.zeros(numel[1], dtype=dtype)
        if extras:
            options.update(seed=7 * run, checksum=True)
        if forget:
            plans.forget_repeated()
        work = call(x, output, **options)
        if work is not None:
            work.wait()
        results.append([output, residual.clone()])
    return results


def add_bias(rank: int, ranks: int) -> None:
    """An epilogue is applied in every call, and each call has its own."""
    y, first, second = torch.empty(4, 8), torch.full((8,), 10.0), torch.full((8,), 20.0)
    for run in range(RUNS):
        for bias in (first, second):
            dtcomm.all_reduce(y.fill_(run + rank), epilogue=epilogue_task(y, bias=bias))
            assert y.eq(ranks * run + 1 + bias).all()
        dtcomm.all_reduce(y.fill_(run + rank))
        assert y.eq(ranks * run + 1).all()


def lose_private_name(rank: int, ranks: int) -> None:
    """Without torch's table of groups a repeated call takes the long way, which names what is missing."""
    x = torch.ones(8)
    for _ in range(3):
        dtcomm.all_reduce(x)
    world = dist.group.WORLD
    for name in ("_world", "_pg_map"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.delattr(c10d, name)
            for group in (None, world):
                with pytest.raises((AttributeError, NameError), match=name):
                    dtcomm.all_reduce(x, group=group)
    dtcomm.all_reduce(x.fill_(1.0))
    assert x.tolist() == [float(ranks)] * 8


def replace_world(rank: int, ranks: int) -> None:
    """A repeated call finds the groups of a world of another class, which has nothing but the two properties."""
    x = torch.ones(8)
    for _ in range(3):
        dtcomm.all_reduce(x)
    world = SimpleNamespace(default_pg=c10d._world.default_pg, pg_map=c10d._world.pg_map)
    repeated = (None, x, x, "all_reduce", "sum", "none", "auto", None, False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(c10d, "_world", world)
        assert plans.run_repeated(repeated, False) is None
        monkeypatch.setattr(world, "pg_map", {})
        assert plans.run_repeated(repeated, False) is False
    assert x.tolist() == [float(ranks) ** 4] * 8


def test_calls_with_an_epilogue_and_without_torchs_table_of_groups() -> None:
    run_ranks(add_bias, 2)
    run_ranks(lose_private_name, 2)
    run_ranks(replace_world, 2)


@on_ranks(2)
def test_which_calls_take_the_short_way(rank: int, ranks: int) -> None:
    """Arguments are compared by value; what the long way has to look at takes it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _count_long_calls(monkeypatch)


def _count_long_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    long_calls = 0
    next_seed = Communicator.next_seed

    def counting(communicator: Communicator, seed: int | None) -> int:
        nonlocal long_calls
        long_calls += 1
        return next_seed(communicator, seed)

    monkeypatch.setattr(Communicator, "next_seed", counting)

    def long_way(call: Call) -> bool:
        before = long_calls
        call()
        return long_calls > before

    x = torch.ones(8)
    dtcomm.all_reduce(x, codec="int8")
    dtcomm.all_reduce(x, codec="int8")
    assert not long_way(lambda: dtcomm.all_reduce(x, codec="int8"))
    assert not long_way(lambda: dtcomm.all_reduce(torch.ones(2, 4), codec="".join(["int", "8"])))
    assert not long_way(lambda: dtcomm.all_reduce(x, codec="int8", group=dist.group.WORLD))
    assert not long_way(lambda: dtcomm.all_reduce(x, codec="int8", async_op=True).wait())
    assert long_way(lambda: dtcomm.all_reduce(torch.ones(9), codec="int8"))
    assert long_way(lambda: dtcomm.all_reduce(x, codec="int4"))
    assert long_way(lambda: dtcomm.all_reduce(x, "avg", codec="int8"))
    residual = torch.zeros(8)
    assert long_way(lambda: dtcomm.all_reduce(x, codec="int8", residual=residual))
    assert not long_way(lambda: dtcomm.all_reduce(x, codec="int8", residual=residual))
    assert not long_way(lambda: dtcomm.all_reduce(x, codec="int8", residual=torch.zeros(8), seed=3))
    assert long_way(lambda: dtcomm.all_reduce(x, codec="int8", checksum=True))
    assert not long_way(lambda: dtcomm.all_reduce(x, codec="int8", checksum=True))
    bias = epilogue_task(x, bias=torch.ones(8))
    assert not long_way(lambda: dtcomm.all_reduce(x, codec="int8", epilogue=bias))
    with pytest.raises(ValueError, match="residual: has 9 elements"):
        dtcomm.all_reduce(x, codec="int8", residual=torch.zeros(9))
    with pytest.raises(ValueError, match="residual"):
        dtcomm.all_reduce(x, codec="int8", residual=x)
    assert long_way(lambda: dtcomm.all_reduce(torch.ones(4, 2).t(), codec="int8"))
    assert long_way(lambda: dtcomm.all_reduce(torch.nn.Parameter(x), codec="int8"))
    group = dist.new_group()
    assert long_way(lambda: dtcomm.all_reduce(x, codec="int8", group=group))
    dtcomm.all_reduce(x, codec="int8", group=group)
    assert not long_way(lambda: dtcomm.all_reduce(x, codec="int8", group=group))
    dtcomm.release(group)  # its communicator is gone; the next call makes another one
    assert long_way(lambda: dtcomm.all_reduce(x, codec="int8", group=group))
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="group: this process group has been destroyed"):
        dtcomm.all_reduce(x, codec="int8", group=group)


@on_ranks(2)
def test_overlapping_tensors_are_refused(rank: int, ranks: int) -> None:
    """Memory is looked at in every call: only this rank's shard of the whole may be shared."""
    whole, shard = torch.ones(8), torch.ones(4)
    for _ in range(3):
        dtcomm.all_gather(whole, shard)
        dtcomm.reduce_scatter(shard, whole)
        dtcomm.all_to_all(torch.empty(8), whole)
    whole[4 * rank : 4 * rank + 4] = rank + 1.0
    dtcomm.all_gather(whole, whole[4 * rank : 4 * rank + 4])
    assert whole.tolist() == [1.0] * 4 + [2.0] * 4
    dtcomm.reduce_scatter(whole[4 * rank : 4 * rank + 4], whole)
    assert whole[4 * rank] == 2 * (rank + 1)
    other = 4 * (1 - rank)
    with pytest.raises(ValueError, match="input: overlaps the memory of output"):
        dtcomm.all_gather(whole, whole[other : other + 4])
    with pytest.raises(ValueError, match="output: overlaps the memory of input"):
        dtcomm.reduce_scatter(whole[2:6], whole)
    with pytest.raises(ValueError, match="output: overlaps the memory of input"):
        dtcomm.all_to_all(whole, whole)


@on_ranks(2)
def test_views_whose_memory_has_other_values_are_refused(rank: int, ranks: int) -> None:
    whole, part = torch.empty(ranks * NUMEL), torch.ones(NUMEL)
    for _ in range(RUNS):
        dtcomm.all_gather(whole, part)
        with pytest.raises(ValueError, match="input: is a lazy view"):
            dtcomm.all_gather(whole, torch._neg_view(part))


@on_ranks(2)
def test_a_mismatch_is_raised(rank: int, ranks: int) -> None:
    x, y = torch.ones(8), torch.ones(16)
    for _ in range(3):
        dtcomm.all_reduce(x)
        dtcomm.all_gather(y, x)
    with pytest.raises(CollectiveMismatch, match="all_gather"):
        if rank == 0:
            dtcomm.all_gather(y, x)
        else:
            dtcomm.all_reduce(x)
    with pytest.raises(CollectiveMismatch):  # every later call raises the same
        dtcomm.all_reduce(x)
    assert dtcomm.flight_record()


@on_ranks(2)
def test_a_lost_peer_is_raised(rank: int, ranks: int) -> None:
    x = torch.ones(8)
    for _ in range(3):
        dtcomm.all_reduce(x)
    if rank == 1:
        dtcomm.release()
        return
    with pytest.raises(PeerLost):
        dtcomm.all_reduce(x)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).view(torch.uint8)


def unscale(payload: torch.Tensor, numel: int) -> torch.Tensor:
    return payload.view(torch.float16)[:numel].to(torch.float32)


@on_ranks(2)
def test_calls_behind_a_codec_in_python(rank: int, ranks: int) -> None:
    """Operations with a codec in Python run on a thread; calls of the engine still come behind them."""
    x = torch.ones(8)
    for _ in range(3):
        dtcomm.all_reduce(x.fill_(1.0))
    codec = dtcomm.codecs.custom("test_repeated_half", scale, unscale, lambda numel: 2 * numel)
    for _ in range(3):
        work = dtcomm.all_reduce(x.fill_(1.0), codec=codec, async_op=True)
        dtcomm.all_reduce(x)
        work.wait()
        assert x.tolist() == [4.0] * 8


def test_nothing_is_known_without_a_process_group() -> None:
    x = torch.ones(4)
    arguments = (None, x, x, "all_reduce", "sum", "none", "auto", None, False)
    assert plans.run_repeated(arguments, False) is False
    with pytest.raises(TypeError, match="expected a tuple and a bool"):
        plans.run_repeated([], False)
