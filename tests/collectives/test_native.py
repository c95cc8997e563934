"""The public collectives on real processes over shared memory: results, dtypes, asynchrony, groups, lifetimes."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtcomm import algorithms, collectives
from dtcomm.codecs import codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.testing import exact
from dtcomm.testing.ranks import run_ranks

SIZES = (0, 1, 7, 1024, 5000, 70_001, 1_500_000)


def call(name: str, given: torch.Tensor, n: int, **options: Any) -> torch.Tensor:
    """The collective on ``given``; its output."""
    root = dist.get_rank() == 0
    if name in ("all_reduce", "broadcast", "reduce"):
        output = given.clone()
        positional = () if name == "all_reduce" else (0,)
        collectives.COLLECTIVES[name](output, *positional, **options)
        return output if root or name != "reduce" else output[:0]
    size = {"reduce_scatter": given.numel() // n, "scatter": given.numel() // n, "all_to_all": given.numel()}
    output = torch.empty(size.get(name, given.numel() * n), dtype=given.dtype)
    if name == "gather":
        collectives.gather(given, output if root else None, **options)
        return output if root else output[:0]
    if name == "scatter":
        collectives.scatter(output, given if root else None, **options)
        return output
    collectives.COLLECTIVES[name](output, given, **options)
    return output


def require_alike(tensor: torch.Tensor, what: object) -> None:
    """All ranks hold the same bits."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert len(set(gathered)) == 1, what


def every_algorithm(rank: int, n: int) -> str:
    for name in collectives.COLLECTIVES:
        for algorithm in (*algorithms.available(name), "auto", "direct"):
            for count in SIZES:
                for spec in ("none", "fp16", "int8"):
                    if algorithm != "auto" and (count not in (0, 1, 5000, 70_001) or spec == "fp16"):
                        continue
                    given = exact.inputs(name, min(count, 400_000), rank=rank, world_size=n) % 64
                    output = call(name, given, n, codec=spec, algorithm=algorithm)
                    if spec != "int8":
                        everyone = [
                            exact.inputs(name, min(count, 400_000), rank=r, world_size=n) % 64
                            for r in range(n)
                        ]
                        stacked = torch.stack(everyone)
                        expected = {
                            "all_reduce": lambda s: s.sum(0),
                            "broadcast": lambda s: s[0],
                            "reduce_scatter": lambda s: s.sum(0).chunk(n)[rank] if s.numel() else s[0],
                            "all_gather": lambda s: s.flatten(),
                            "reduce": lambda s: s.sum(0) if rank == 0 else s[0][:0],
                            "gather": lambda s: s.flatten() if rank == 0 else s[0][:0],
                            "scatter": lambda s: s[0].view(n, -1)[rank] if s.numel() else s[0],
                            "all_to_all": lambda s: (
                                s.view(n, n, -1)[:, rank].flatten() if s.numel() else s[0]
                            ),
                        }[name](stacked)
                        assert torch.equal(output, expected), (name, algorithm, count, spec)
                    if name in ("all_reduce", "broadcast", "all_gather"):
                        require_alike(output, (name, algorithm, count, spec))
    return str(collectives.info()["runtime"])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_algorithm_on_processes(n: int) -> None:
    assert run_ranks(every_algorithm, n, timeout=200) == ["native"] * n


def every_dtype(rank: int, n: int) -> None:
    for dtype in ELEMENT_TYPES:
        if dtype in (torch.bool, torch.int16):
            continue  # no exact inputs; the kernels' tests have them
        for op in ("sum", "avg", "min", "max"):
            if op == "avg" and not dtype.is_floating_point:
                continue
            for name in ("all_reduce", "reduce_scatter"):
                given = exact.inputs(name, 3001, dtype, op=op, rank=rank, world_size=n)
                expected = exact.expected(name, 3001, dtype, op=op, rank=rank, world_size=n)
                output = call(name, given, n, op=op)
                assert exact.wrong(output, expected) == 0, (dtype, op, name)
        if dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8):
            torch.manual_seed(rank)
            ours = torch.randint(0, 20, (513,)).to(dtype)
            theirs = ours.clone()
            dist.all_reduce(theirs)
            assert torch.equal(call("all_reduce", ours, n), theirs), dtype


def test_every_dtype() -> None:
    run_ranks(every_dtype, 3)


def asynchrony(rank: int, n: int) -> None:
    torch.manual_seed(5)  # the same inputs everywhere: results can be told without talking
    tensors = [torch.randint(-9, 9, (1 + 40_000 * (i % 3),)).float() for i in range(30)]
    expected = [tensor * n for tensor in tensors]
    works = [collectives.all_reduce(tensor, async_op=True) for tensor in tensors]
    inline = torch.ones(100)
    collectives.all_reduce(inline)  # behind the queue: in issue order
    assert all(work is not None and work.is_completed() for work in works)
    assert torch.equal(inline, torch.full((100,), float(n)))
    for tensor, want, work in zip(tensors, expected, works, strict=True):
        assert work is not None
        work.wait()
        assert torch.equal(tensor, want)
        assert work.wire_bytes > 0 and work.seconds > 0

    futures = []
    for i in range(20):
        tensor = torch.full((1000 * i + 1,), float(rank))
        work = collectives.all_reduce(tensor, async_op=True)
        assert work is not None
        futures.append(work.get_future().then(lambda done: done.value()[0].sum().item()))
        del work, tensor  # nobody holds them: the engine does
    gc.collect()
    sums = [future.wait() for future in futures]
    assert sums == [(1000 * i + 1) * n * (n - 1) / 2 for i in range(20)]

    empty = collectives.all_reduce(torch.empty(0), async_op=True)
    assert empty is not None
    assert empty.get_future().wait()[0].numel() == 0


@pytest.mark.parametrize("n", [2, 4])
def test_async_operations_run_in_issue_order(n: int) -> None:
    run_ranks(asynchrony, n)


def groups(rank: int, n: int) -> None:
    world = torch.tensor([float(rank)])
    subgroups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [3, 1, 0])]
    mine = [group for group in subgroups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    for _ in range(5):
        works = []
        for group in mine:
            tensor = torch.full((5000,), float(rank + 1))
            works.append((group, tensor, collectives.all_reduce(tensor, group=group, async_op=True)))
        collectives.all_reduce(world)
        for group, tensor, work in works:
            assert work is not None
            work.wait()
            members = dist.get_process_group_ranks(group)
            assert torch.equal(tensor, torch.full((5000,), float(sum(member + 1 for member in members))))
    outside = next(group for group in subgroups if group not in mine)
    with pytest.raises(ValueError, match="group"):
        collectives.all_reduce(torch.ones(1), group=outside)
    pair = mine[0]
    members = dist.get_process_group_ranks(pair)
    tensor = torch.tensor([float(rank)])
    collectives.broadcast(tensor, src=members[1], group=pair)
    assert tensor.item() == members[1]
    stranger = next(r for r in range(n) if r not in members)
    with pytest.raises(ValueError, match=rf"src: rank {stranger} is not in the group; its ranks are"):
        collectives.broadcast(tensor, src=stranger, group=pair)
    dist.barrier()
    dist.destroy_process_group(pair)
    with pytest.raises(ValueError, match="destroyed"):
        collectives.all_reduce(tensor, group=pair)


def lifetimes(rank: int, n: int) -> None:
    """An operation that has ended holds no tensor, whichever way one learned of its end."""
    ends: list[Callable[[Any], Any]] = [
        lambda work: work.wait(),
        lambda work: work.get_future().wait(),
        lambda work: [None for _ in iter(work.is_completed, True)],
    ]
    for end in ends:
        tensor = torch.ones(1000)
        seen = weakref.ref(tensor)
        work = collectives.all_reduce(tensor, async_op=True)
        end(work)
        del work, tensor
        deadline = time.monotonic() + 5  # the thread of futures may still be at its last line
        while seen() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert seen() is None


def test_what_has_ended_holds_no_tensor() -> None:
    run_ranks(lifetimes, 2)


def test_subgroups_and_several_communicators_at_once() -> None:
    run_ranks(groups, 4)


def packing(rank: int, n: int) -> None:
    torch.manual_seed(rank)
    sizes = [3, 1024, 0, 5000, 33, 70_000]
    specs = ["none", "int8", "fp16", "int8:block=64", "bf16", "int8"]
    tensors = [torch.randn(size) for size in sizes]
    residuals = [
        torch.zeros(size) if spec.startswith("int8") else None
        for size, spec in zip(sizes, specs, strict=True)
    ]
    single = [tensor.clone() for tensor in tensors]
    for tensor, spec in zip(single, specs, strict=True):
        collectives.all_reduce(tensor, "avg", codec=spec, algorithm="two_shot")
    for bucket_bytes in (25 * 2**20, 4096):
        together = [tensor.clone() for tensor in tensors]
        kept = [None if residual is None else residual.clone() for residual in residuals]
        collectives.all_reduce_coalesced(
            together, "avg", codec=specs, algorithm="two_shot", residuals=kept, bucket_bytes=bucket_bytes
        )
        for mine, alone, spec in zip(together, single, specs, strict=True):
            assert torch.equal(mine, alone), spec  # a result does not depend on what it is sent with
            require_alike(mine, spec)
        assert all(residual is None or residual.numel() == 0 or residual.abs().sum() > 0 for residual in kept)
        work = collectives.all_reduce_coalesced(
            [tensor.clone() for tensor in tensors], codec=specs, async_op=True, bucket_bytes=bucket_bytes
        )
        assert work is not None
        assert len(work.get_future().wait()) == len(sizes)
        payload = sum(codec(spec).wire_bytes(size) for size, spec in zip(sizes, specs, strict=True))
        assert work.wire_bytes >= payload * 0.5 * (n - 1) / n
    collectives.all_reduce_coalesced([])


@pytest.mark.parametrize("n", [2, 3])
def test_a_packing_is_one_message_in_which_each_tensor_keeps_its_own_result(n: int) -> None:
    run_ranks(packing, n)


def shared_tensors(rank: int, n: int) -> None:
    for count in (1, 5, 1000, 50_000, 700_001):
        for mixed in (False, True):
            # In the mixed round rank 0's tensor is an ordinary one: all must take the staged way together.
            make = torch.empty if mixed and rank == 0 else collectives.empty
            for op in ("sum", "avg"):
                tensor = make(count)
                tensor.copy_(exact.inputs("all_reduce", count, op=op, rank=rank, world_size=n))
                collectives.all_reduce(tensor, op, algorithm="two_shot")
                assert (
                    exact.wrong(tensor, exact.expected("all_reduce", count, op=op, rank=rank, world_size=n))
                    == 0
                )
            given = make(count * n)
            given.copy_(exact.inputs("reduce_scatter", count, rank=rank, world_size=n))
            output = torch.empty(count)
            collectives.reduce_scatter(output, given)
            assert exact.wrong(output, exact.expected("reduce_scatter", count, rank=rank, world_size=n)) == 0
            given.zero_()  # nobody reads it any more
            shard = make(count)
            shard.copy_(exact.inputs("all_gather", count, rank=rank, world_size=n))
            gathered = torch.empty(count * n)
            collectives.all_gather(gathered, shard)
            shard.zero_()
            assert exact.wrong(gathered, exact.expected("all_gather", count, rank=rank, world_size=n)) == 0
    whole = collectives.empty(4, 250)
    whole[:] = rank
    view = whole.view(-1)[10:510]  # a part of a region
    collectives.all_reduce(view, algorithm="two_shot")
    assert view.sum().item() == 500 * n * (n - 1) / 2 and whole.view(-1)[510:].eq(rank).all()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        tensor = collectives.empty(1000)
        tensor.fill_(1.0)
        collectives.all_reduce(tensor, algorithm="two_shot")
        del tensor
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert collectives.empty(2, 3, dtype=torch.int32).dtype is torch.int32
    assert collectives.empty((2, 3)).shape == (2, 3)
    assert collectives.empty(0).numel() == 0


def copied_from_shared(rank: int, n: int) -> None:
    root, peer = n - 1, rank ^ 1
    for count in (1000, 50_000, 300_001):
        for mixed in (False, True):
            make = torch.empty if mixed and rank == root else collectives.empty

            def given(collective: str, shards: int, make: Any = make, count: int = count) -> torch.Tensor:
                tensor = make(count * shards)
                return tensor.copy_(exact.inputs(collective, count, rank=rank, world_size=n))

            def check(collective: str, result: torch.Tensor, count: int = count) -> None:
                expected = exact.expected(collective, count, rank=rank, world_size=n, root=root)
                assert exact.wrong(result[: expected.numel()], expected) == 0, (collective, count)

            tensor = given("broadcast", 1)
            collectives.broadcast(tensor, root)
            check("broadcast", tensor)
            tensor = given("reduce", 1)
            collectives.reduce(tensor, root)
            check("reduce", tensor)
            for collective in ("gather", "scatter", "all_to_all"):
                source = given(collective, 1 if collective == "gather" else n)
                output = torch.empty(count if collective == "scatter" else count * n)
                if collective == "gather":
                    collectives.gather(source, output if rank == root else None, root)
                elif collective == "scatter":
                    collectives.scatter(output, source if rank == root else None, root)
                else:
                    collectives.all_to_all(output, source)
                source.zero_()  # nobody reads it any more
                check(collective, output)
            if peer < n:
                source, output = given("sendrecv", 1), torch.empty(count)
                for sends in (rank < peer, rank > peer):
                    if sends:
                        collectives.send(source, peer)
                    else:
                        collectives.recv(output, peer)
                source.zero_()
                expected = exact.inputs("sendrecv", count, rank=peer, world_size=n)
                assert exact.wrong(output, expected) == 0


@pytest.mark.parametrize("n", [2, 3])
def test_copies_are_made_from_shared_memory(n: int) -> None:
    run_ranks(copied_from_shared, n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_tensors_in_shared_memory(n: int) -> None:
    run_ranks(shared_tensors, n)


def layouts(rank: int, n: int) -> None:
    transposed = torch.arange(12.0).view(3, 4).t()
    collectives.all_reduce(transposed)
    assert torch.equal(transposed, torch.arange(12.0).view(3, 4).t() * n)
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    collectives.all_reduce(image)
    assert image.eq(n).all()
    whole = torch.arange(float(3 * n))
    mine = whole[3 * rank : 3 * rank + 3]
    collectives.all_gather(whole, mine)  # in place
    collectives.reduce_scatter(mine, whole)
    assert torch.equal(mine, torch.arange(3.0 * n)[3 * rank : 3 * rank + 3] * n)
    unaligned = torch.zeros(4097, dtype=torch.uint8)[1:]
    collectives.all_reduce(unaligned)


def test_layouts() -> None:
    run_ranks(layouts, 2)


def threads(rank: int, n: int) -> None:
    """Threads of one process may use different groups at once."""
    lanes = [dist.new_group(list(range(n))) for _ in range(3)]
    failures: list[BaseException] = []

    def work(group: dist.ProcessGroup) -> None:
        try:
            for i in range(50):
                tensor = torch.full((100 * i + 1,), 1.0)
                collectives.all_reduce(tensor, group=group)
                assert tensor.eq(n).all()
        except BaseException as error:
            failures.append(error)

    for group in lanes:  # communicators are made in the same order everywhere
        collectives.all_reduce(torch.ones(1), group=group)
    running = [threading.Thread(target=work, args=(group,)) for group in lanes]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failures


def test_threads() -> None:
    run_ranks(threads, 2)


def rounds(rank: int, n: int) -> tuple[list[int], list[int]]:
    counts = []
    for i in range(60):
        tensor = torch.ones(10 + i)
        work = collectives.all_reduce(tensor, async_op=True)
        assert work is not None
        work.get_future().wait()
        collectives.release()
        if i in (9, 59):
            dist.barrier()
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), _mappings()))
    return counts


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("dtcomm")


def test_create_and_destroy_leaves_nothing() -> None:
    shm = set(os.listdir("/dev/shm"))
    for early, late in run_ranks(rounds, 2):
        assert late == early, "descriptors, threads or mappings grow with the rounds"
    assert set(os.listdir("/dev/shm")) <= shm


def single(rank: int, n: int) -> None:
    tensor = torch.randn(1000)
    kept = tensor.clone()
    residual = torch.full((1000,), 0.5)
    collectives.all_reduce(tensor, "avg", codec="int8", residual=residual)
    assert torch.equal(tensor, kept) and residual.eq(0.5).all()
    output = torch.empty(1000)
    collectives.all_gather(output, tensor, codec="int8")
    assert torch.equal(output, kept)
    work = collectives.all_reduce(tensor, async_op=True)
    assert work is not None and work.is_completed()
    assert torch.equal(work.get_future().wait()[0], kept)
    with pytest.raises(ValueError, match="codec"):
        collectives.all_reduce(tensor, codec="int9")


def test_world_size_one_does_nothing_and_loses_nothing() -> None:
    run_ranks(single, 1)


def seeds(rank: int, n: int) -> None:
    torch.manual_seed(rank)
    given = torch.randn(5000)
    spec = "int8:round=stochastic"

    def once(seed: int | None) -> torch.Tensor:
        tensor = given.clone()
        collectives.all_reduce(tensor, codec=spec, seed=seed)
        return tensor

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))
    assert not torch.equal(once(None), once(None))  # the call's number


def test_seeds() -> None:
    run_ranks(seeds, 2)


def looks(rank: int, world_size: int) -> bool:
    """Whether operations of 4 KB made the engine look how far apart the cores are, in 20 times as many as it takes."""
    x, seen = torch.zeros(1024), torch.zeros(1)
    for _ in range(20):
        for _ in range(1024):
            collectives.all_reduce(x)
        seen[0] = float(collectives.info()["round_trip_ns"] > 0)
        collectives.all_reduce(seen)
        if seen[0] == world_size:
            return True
    return False


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to look at")
def test_small_operations_look_where_the_cores_are_too() -> None:
    # What is staged past a cache that the peer shares, or into one that it does not, took up to four times as long.
    assert run_ranks(looks, 2) == [True, True]
