"""Waiting threads drive the engine: threads that wait for different operations, and ranks with nothing to send."""

from __future__ import annotations

import threading
import time

import torch

from dtcomm import collectives
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks


def issue_empty_operations(rank: int, n: int) -> tuple[float, float]:
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
    issued = time.monotonic()
    for work in works:
        work.wait()
    x = torch.ones(3)
    collectives.all_reduce(x)
    assert x.eq(n).all()
    return began, issued


def test_rank_with_nothing_to_send_does_not_run_ahead() -> None:
    (_, issued), (began, _) = run_ranks(issue_empty_operations, 2)
    assert issued >= began


@on_ranks(2)
def test_two_threads_wait_for_two_operations(rank: int, n: int) -> None:
    # Rank 0 waits for its second message first. It comes when rank 1 has an answer to the first, which another thread
    # gives: the thread that drives the engine must report it to the other one.
    first_message, second_message = torch.zeros(200_000), torch.zeros(200_000)
    for _ in range(20):
        if rank == 1:
            collectives.send(first_message + 1, 0)
            collectives.recv(second_message, 0)
            collectives.send(second_message + 1, 0)
            continue
        first = collectives.recv(first_message, 1, async_op=True)
        second = collectives.recv(second_message, 1, async_op=True)
        assert first is not None and second is not None

        def answer(work: collectives.Work = first) -> None:
            work.wait()
            collectives.send(first_message + 1, 1)

        later = threading.Thread(target=second.wait)
        later.start()
        time.sleep(0.002)
        thread = threading.Thread(target=answer)
        thread.start()
        later.join(20)
        thread.join(20)
        assert second.is_completed() and first.is_completed()
        assert first_message.eq(1).all() and second_message.eq(3).all()


@on_ranks(3)
def test_ring_messages_beside_all_reduces(rank: int, n: int) -> None:
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
            for work in works:  # a wait for the first operation also drives the later ones
                work.wait()
            assert incoming.eq(left).all() and reduced.eq(n * (n - 1) / 2).all()


def take_values_after_waiting(rank: int, n: int) -> list[float]:
    """Return the values of futures that are asked for when the operation has been waited for."""
    values = []
    for _ in range(300):
        work = collectives.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        work.wait()
        values.append(float(work.get_future().value()[0][0]))
    return values


def test_future_of_a_finished_operation_is_complete() -> None:
    assert run_ranks(take_values_after_waiting, 2) == [[2.0] * 300] * 2
