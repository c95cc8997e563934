"""Waiting threads drive the engine: threads that wait for different operations, and ranks with nothing to send."""

from __future__ import annotations

import threading
import time

import torch

from dtcomm import collectives
from dtcomm.launch.ranks import run_ranks


def nothing_ahead(rank: int, n: int) -> tuple[float, float]:
    """Return when, by the clock of all processes, this rank began and when it had started all operations."""
    collectives.barrier()
    if rank == 1:
        time.sleep(0.3)
    began = time.monotonic()
    works = []
    for number in range(200):
        if number % 2:
            collectives.broadcast(torch.empty(0), 0)
        else:
            works.append(collectives.all_reduce(torch.empty(0), async_op=True))
    ahead = time.monotonic()
    for work in works:
        work.wait()
    x = torch.ones(3)
    collectives.all_reduce(x)
    assert x.eq(n).all()
    return began, ahead


def test_a_rank_with_nothing_to_send_does_not_run_away() -> None:
    (_, ahead), (began, _) = run_ranks(nothing_ahead, 2)
    assert ahead >= began


def by_turns(rank: int, n: int) -> None:
    # Rank 0 waits for its second message first. It comes when rank 1 has an answer to the first, which another thread
    # gives: the thread that drives must not keep what it has driven to itself.
    one, two = torch.zeros(200_000), torch.zeros(200_000)
    for _ in range(20):
        if rank == 1:
            collectives.send(one + 1, 0)
            collectives.recv(two, 0)
            collectives.send(two + 1, 0)
            continue
        first = collectives.recv(one, 1, async_op=True)
        second = collectives.recv(two, 1, async_op=True)
        assert first is not None and second is not None

        def answer(work: collectives.Work = first) -> None:
            work.wait()
            collectives.send(one + 1, 1)

        later = threading.Thread(target=second.wait)
        later.start()
        time.sleep(0.002)
        thread = threading.Thread(target=answer)
        thread.start()
        later.join(20)
        thread.join(20)
        assert second.is_completed() and first.is_completed()
        assert one.eq(1).all() and two.eq(3).all()


def test_two_threads_wait_for_two_operations() -> None:
    run_ranks(by_turns, 2)


def both_ways(rank: int, n: int) -> None:
    right, left = (rank + 1) % n, (rank - 1) % n
    for numel in (1, 3000, 400_000):
        for _ in range(20):
            outgoing, incoming = torch.full((numel,), float(rank)), torch.empty(numel)
            works = [
                collectives.send(outgoing, right, async_op=True),
                collectives.recv(incoming, left, async_op=True),
            ]
            reduced = outgoing.clone()
            works.append(collectives.all_reduce(reduced, async_op=True))
            for work in works:  # what comes later is driven while the first is waited for
                work.wait()
            assert incoming.eq(left).all() and reduced.eq(n * (n - 1) / 2).all()


def test_rings_of_messages() -> None:
    run_ranks(both_ways, 3)
