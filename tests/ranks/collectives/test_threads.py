"""Ranks with several threads: every collective gives the bytes of one thread, whatever else the process does."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dtcomm
from dtcomm import _C, collectives
from dtcomm.codecs import custom
from dtcomm.launch.ranks import run_ranks
from tests.support.python_codecs import bf16_bytes, decode_bf16, encode_bf16

NUMEL = 200_003  # 800 KB: several parts in each piece
CODECS = (
    "none",
    "bf16",
    "int8:round=stochastic",
    "int4:rotate=hadamard",
    "fp8_e4m3",
    "sign",
    "topk:ratio=0.05",
)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def new_input(rank: int, shared: bool, numel: int = NUMEL) -> torch.Tensor:
    x = dtcomm.empty(numel) if shared else torch.empty(numel)
    return x.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(rank)))


def run_collectives(rank: int, n: int, codec: str, shared: bool, async_op: bool) -> dict[str, str]:
    """Return the digests of what this rank gets from each collective."""
    options: dict[str, Any] = {"codec": codec, "async_op": async_op, "seed": 7}
    share = NUMEL // n

    def wait(work: Any) -> None:
        if async_op:
            work.wait()

    results = {}
    for algorithm in ("one_shot", "two_shot", "ring"):
        x = new_input(rank, shared)
        residual = None if codec == "none" else torch.zeros(NUMEL)
        wait(collectives.all_reduce(x, "avg", algorithm=algorithm, residual=residual, **options))
        results[f"all_reduce {algorithm}"] = digest(x)
        if residual is not None:
            results[f"residual {algorithm}"] = digest(residual)
    x, out = new_input(rank, shared, share * n), new_input(rank, shared, share)
    wait(collectives.reduce_scatter(out, x, **options))
    results["reduce_scatter"] = digest(out)
    wait(collectives.all_gather(x, out, **options))
    results["all_gather"] = digest(x)
    out = new_input(rank, shared, share * n)
    wait(collectives.all_to_all(out, x, **options))
    results["all_to_all"] = digest(out)
    x = new_input(rank, shared)
    wait(collectives.broadcast(x, 1, **options))
    results["broadcast"] = digest(x)
    x = new_input(rank, shared)
    wait(collectives.reduce(x, 0, **options))
    results["reduce"] = digest(x) if rank == 0 else ""
    peer = rank ^ 1
    if peer < n:
        x, out = new_input(rank, shared), new_input(rank, shared)
        send = collectives.send(x, peer, codec=codec, async_op=True, seed=7)
        collectives.recv(out, peer, codec=codec)
        send.wait()
        results["recv"] = digest(out)
    return results


def run_all(rank: int, n: int, codecs: Sequence[str]) -> tuple[int, int, dict[str, dict[str, str]]]:
    results = {}
    for codec in codecs:
        for shared in (False, True) if codec == "none" else (False,):
            for async_op in (False, True):
                name = f"{codec} {shared} {async_op}"
                results[name] = run_collectives(rank, n, codec, shared, async_op)
    return collectives.info()["threads"], _C.helper_threads(), results


def require_bytes_of_one_thread(n: int, count: int, copies: str, codecs: Sequence[str]) -> None:
    want = run_ranks(run_all, n, codecs, env={"DTCOMM_THREADS": "1"})
    variables = {"DTCOMM_SINGLE_COPY": copies, "DTCOMM_THREADS": str(count)}
    got = run_ranks(run_all, n, codecs, env=variables)
    for rank in range(n):
        (one, _, expected), (threads, helpers, results) = want[rank], got[rank]
        assert (one, threads) == (1, count) and helpers >= count - 1
        assert results == expected, rank


def test_every_collective_has_the_bytes_of_one_thread() -> None:
    require_bytes_of_one_thread(2, 3, "on", ["none", "int8:round=stochastic"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "count", "copies"), [(2, 2, "auto"), (2, 4, "off"), (3, 2, "on"), (3, 3, "auto"), (4, 2, "auto")]
)
def test_more_numbers_of_ranks_and_threads(n: int, count: int, copies: str) -> None:
    require_bytes_of_one_thread(n, count, copies, CODECS)


@pytest.mark.parametrize("variables", [{"DTCOMM_CHECKSUM": "1"}, {"DTCOMM_TRANSPORT": "sockets"}])
def test_checksums_and_sockets(variables: dict[str, str]) -> None:
    (_, _, want), *_ = run_ranks(run_all_reduces, 2, env={**variables, "DTCOMM_THREADS": "1"})
    for threads, _, results in run_ranks(run_all_reduces, 2, env={**variables, "DTCOMM_THREADS": "3"}):
        assert threads == 3 and results == want


def run_all_reduces(rank: int, n: int) -> tuple[int, int, dict[str, str]]:
    results = {}
    for codec in ("none", "int8"):
        x = new_input(rank, False, 3_000_000)
        collectives.all_reduce(x, codec=codec)
        results[codec] = digest(x)
    return collectives.info()["threads"], _C.helper_threads(), results


def in_threads(functions: list[Callable[[], None]]) -> None:
    """Run functions at the same time; raises the first error."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[function]) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def use_several_communicators(rank: int, n: int) -> bool:
    """Use three communicators in as many threads, one of them also asynchronously."""
    groups = [dist.new_group(list(range(n))) for _ in range(3)]
    for group in groups:
        collectives.all_reduce(torch.ones(1), group=group)

    def run(group: Any, index: int) -> None:
        for step in range(6):
            x = torch.full((NUMEL,), float(rank + step))
            y = torch.full((NUMEL,), float(rank * step))
            work = collectives.all_reduce(x, group=group, async_op=True)
            if index == 0:
                collectives.all_reduce(y, group=group)
            work.wait()
            assert x.eq(sum(range(n)) + n * step).all()
            assert index != 0 or y.eq(sum(range(n)) * step).all()

    in_threads([lambda group=group, index=index: run(group, index) for index, group in enumerate(groups)])
    return bool(_C.helper_threads())


def test_several_communicators_share_the_threads() -> None:
    assert run_ranks(use_several_communicators, 2, env={"DTCOMM_THREADS": "3"}) == [True, True]


def use_a_python_codec(rank: int, n: int) -> bool:
    codec = custom("threads_bf16", encode_bf16, decode_bf16, bf16_bytes)
    x = torch.full((NUMEL,), rank + 1.0)
    collectives.all_reduce(x, codec=codec)
    y = torch.full((NUMEL,), rank + 1.0)
    collectives.all_reduce(y)
    return bool(x.eq(y).all()) and bool(y.eq(n * (n + 1) / 2).all())


def test_codecs_in_python() -> None:
    assert run_ranks(use_a_python_codec, 2, env={"DTCOMM_THREADS": "2"}) == [True, True]


def close_while_running(rank: int, n: int) -> list[str]:
    """Destroy the group while other threads run operations on it."""
    errors = []
    for _ in range(5):
        group = dist.new_group(list(range(n)))
        collectives.all_reduce(torch.ones(1), group=group)
        began = threading.Event()

        def run(group: Any = group, began: threading.Event = began) -> None:
            x = torch.ones(2_000_000)
            try:
                while True:
                    collectives.all_reduce(x, group=group)
                    began.set()
            except Exception as error:
                errors.append(type(error).__name__)

        thread = threading.Thread(target=run)
        thread.start()
        began.wait()
        dist.destroy_process_group(group)
        collectives.release(dist.group.WORLD)  # closes the communicators of destroyed groups, too
        thread.join()
    return errors


def test_close_while_running() -> None:
    for errors in run_ranks(close_while_running, 2, env={"DTCOMM_THREADS": "3"}):
        assert len(errors) == 5 and set(errors) <= {"CommunicatorClosed", "PeerLost", "ValueError"}, errors


def tune(rank: int, n: int) -> list[dict[str, Any]]:
    x = torch.empty(100_000)
    for step in range(150):
        x.fill_(rank + step)
        collectives.all_reduce(x, algorithm="two_shot")
        assert x.eq(sum(range(n)) + n * step).all()
    choices: list[dict[str, Any]] = collectives.info()["choices"]
    return choices


def test_a_number_that_is_given_is_not_tried() -> None:
    first, second = run_ranks(tune, 2, env={"DTCOMM_THREADS": "2"})
    assert [choice["parallel"] for choice in first] == [True]
    assert [choice["parallel"] for choice in second] == [True]


def tune_with_more_cores(rank: int, n: int) -> tuple[int, list[dict[str, Any]]]:
    """Run operations as if each rank had two cores."""
    with mock.patch.object(os, "sched_getaffinity", lambda _: set(range(2 * n))):
        collectives.all_reduce(torch.ones(1))
    choices = tune(rank, n)
    return collectives.info()["threads"], choices


def test_trials_choose_between_one_thread_and_several() -> None:
    (count, first), (other_count, second) = run_ranks(
        tune_with_more_cores, 2, fresh=True, env={"DTCOMM_THREADS": "0", "LOCAL_WORLD_SIZE": "2"}
    )
    assert count == other_count == 2
    # What takes less time is chosen, so on shared cores one thread may be; the ranks choose alike.
    for choice, other in zip(first, second, strict=True):
        assert choice["trials"] >= 14
        assert {**choice, "microseconds": 0} == {**other, "microseconds": 0}


def run_without_new_threads(rank: int, world_size: int) -> tuple[float, float]:
    dtcomm.all_reduce(torch.ones(10))  # connects the ranks
    dist.barrier()
    is_root = os.geteuid() == 0
    if rank == 1:
        if is_root:  # no limit holds for root
            os.setresuid(1103, 1103, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    try:
        if rank == 1:
            with pytest.raises(RuntimeError):
                threading.Thread(target=int).start()
        large = torch.ones(3_000_000)
        dtcomm.all_reduce(large, async_op=True).wait()
        (small,) = dtcomm.all_reduce(torch.ones(1000), async_op=True).get_future().wait()
    finally:
        if rank == 1 and is_root:
            os.setresuid(0, 0, 0)
    return float(large.mean()), float(small.mean())


def test_a_rank_that_may_start_no_thread_runs_asynchronous_operations_itself() -> None:
    assert run_ranks(run_without_new_threads, 2, fresh=True) == [(2.0, 2.0)] * 2
