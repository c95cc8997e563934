"""send and recv by tag, from any source, in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtcomm.backend.p2p_matching import MessageMatcher
from dtcomm.errors import CollectiveMismatch, CollectiveTimeout
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks
from tests.support.stopwatch import Stopwatch

SIZES = (
    0,
    1,
    500,
    507,
    508,
    100_000,
)  # in float32: around the size at which a message no longer fits into its header


def _message(numel: int, key: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 1000 * key


def exchange(rank: int, world_size: int) -> None:
    """Every rank sends to every other, with blocking and non-blocking calls."""
    for numel in SIZES:
        for shift in range(1, world_size):
            received = torch.empty(numel)
            if rank < (rank + shift) % world_size:
                dist.send(_message(numel, rank), (rank + shift) % world_size)
                dist.recv(received, (rank - shift) % world_size)
            else:
                dist.recv(received, (rank - shift) % world_size)
                dist.send(_message(numel, rank), (rank + shift) % world_size)
            assert torch.equal(received, _message(numel, (rank - shift) % world_size))
        peers = [peer for peer in range(world_size) if peer != rank]
        results = [torch.empty(numel) for _ in peers]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, result, peer) for peer, result in zip(peers, results)]
            + [dist.P2POp(dist.isend, _message(numel, rank), peer) for peer in peers]
        )
        for work in works:
            work.wait()
        for peer, result in zip(peers, results):
            assert torch.equal(result, _message(numel, peer))


@on_ranks(2, backend="dtcomm")
def test_messages_are_matched_by_tag(rank: int, world_size: int) -> None:
    """Short and long messages are received in another order than they were sent."""
    tags = [3, 1, 4, 1, 5, 9, 2, 6]
    sizes = [10, 5000, 20, 7000, 3, 100_000, 1, 0]
    if rank == 0:
        works = [dist.isend(_message(size, tag), 1, tag=tag) for tag, size in zip(tags, sizes)]
        for work in works:
            work.wait()
        return
    first_of_tag: dict[int, list[int]] = {}
    for tag, size in zip(tags, sizes):
        first_of_tag.setdefault(tag, []).append(size)
    for tag in sorted(first_of_tag, reverse=True):
        for size in first_of_tag[tag]:
            received = torch.empty(size)
            assert dist.recv(received, 0, tag=tag) == 0
            assert torch.equal(received, _message(size, tag))


def receive_from_any_source(rank: int, world_size: int) -> list[int]:
    """Rank 0 receives from any rank by tag, the long messages first."""
    if rank != 0:
        for numel in (4, 4000):
            dist.send(torch.full((numel,), float(rank)), 0, tag=numel)
        return []
    sources = []
    for numel in (4000, 4):
        for _ in range(world_size - 1):
            received = torch.empty(numel)
            source = dist.recv(received, tag=numel)
            assert torch.equal(received, torch.full((numel,), float(source)))
            sources.append(source)
    return sources


def receive_without_waiting(rank: int, world_size: int) -> None:
    """A posted receive makes progress although its rank does not wait for it."""
    if rank == 0:
        received = torch.empty(300_000)
        work = dist.irecv(received, 1)
        dist.barrier()
        work.wait()
        assert torch.equal(received, _message(300_000, 1))
    else:
        dist.send(_message(300_000, 1), 0)
        dist.barrier()


def send_to_itself(rank: int, world_size: int) -> None:
    received = torch.empty(5)
    receive = dist.irecv(received, rank)
    send = dist.isend(_message(5, rank), rank)
    assert send is not None and receive is not None
    send.wait()
    receive.wait()
    assert torch.equal(received, _message(5, rank))


def receive_wrong_sizes(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.send(torch.zeros(4), 1)
        dist.send(torch.zeros(4000), 1)
        dist.send(torch.ones(4), 1)
        return
    for numel in (3, 3000):
        with pytest.raises(
            CollectiveMismatch, match=r"rank 0 sends \d+ bytes with tag 0, rank 1 receives \d+"
        ):
            dist.recv(torch.empty(numel), 0)
    received = torch.empty(4)
    dist.recv(received, 0)  # later messages are unaffected
    assert received.sum() == 4
    watch = Stopwatch()
    work = dist.irecv(received, 0)
    from datetime import timedelta

    with pytest.raises(CollectiveTimeout, match="recv of 16 bytes from rank 0"):
        work.wait(timedelta(seconds=0.2))
    assert watch.elapsed().within(cpu_s=2, wall_s=10)


@on_ranks(3, backend="dtcomm")
def test_groups_do_not_receive_each_others_messages(rank: int, world_size: int) -> None:
    """Ranks are global ranks, and groups do not receive each other's messages."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    peer = 2 - rank
    received_in_group, received_globally = torch.empty(3), torch.empty(3)
    works = [
        dist.isend(_message(3, rank), peer, group=group),
        dist.isend(_message(3, rank + 5), peer),
        dist.irecv(received_globally, peer),
        dist.irecv(received_in_group, peer, group=group),
    ]
    for work in works:
        work.wait()
    assert torch.equal(received_in_group, _message(3, peer)) and torch.equal(
        received_globally, _message(3, peer + 5)
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_sends_to_every_other(ranks: int) -> None:
    run_ranks(exchange, ranks, backend="dtcomm")


def test_messages_are_received_from_any_source() -> None:
    sources = run_ranks(receive_from_any_source, 3, backend="dtcomm")[0]
    assert sorted(sources) == [1, 1, 2, 2]


def repeat_messages(rank: int, world_size: int) -> None:
    """Short messages that repeat earlier ones arrive by tag, in views, beside long ones and collectives."""
    peer = 1 - rank
    for repetition in range(5):
        for numel in (4, 0, 5000):
            received = torch.empty(numel)
            works = [
                dist.irecv(torch.empty(3), peer, tag=9),
                dist.irecv(received, peer, tag=2),
                dist.isend(_message(numel, rank + repetition), peer, tag=2),
            ]
            if repetition % 2:
                dist.all_reduce(torch.ones(4))  # starts the receives
            works[1].wait()
            works[2].wait()
            assert works[1].is_completed() and works[1].source_rank() == peer
            assert torch.equal(received, _message(numel, peer + repetition))
            dist.send(torch.ones(3), peer, tag=9)
            works[0].wait()
        received = torch._neg_view(torch.zeros(4))
        matrix = torch.zeros(4, 2)
        if rank == 0:
            dist.send(torch._neg_view(torch.ones(4)), 1)
            dist.send(_message(4, 1), 1)
        else:
            dist.recv(received, 0)
            assert received.tolist() == [-1] * 4
            dist.recv(matrix[:, 1], 0)
            assert torch.equal(matrix[:, 1], _message(4, 1)) and not matrix[:, 0].any()
    futures = [dist.irecv(torch.empty(4), peer).get_future() for _ in range(3)]
    for key in range(3):
        dist.send(_message(4, key), peer)
    for key, future in enumerate(futures):
        assert torch.equal(future.wait()[0], _message(4, key))


def wait_for_sends_first(rank: int, world_size: int) -> None:
    """A rank that waits for its own send starts its receives, without the thread that looks for them."""
    peer = 1 - rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MessageMatcher, "_watch", lambda matcher: None)
        for key in range(3):
            received = torch.empty(100_000)
            sent = dist.isend(_message(100_000, rank + key), peer)
            receive = dist.irecv(received, peer)
            sent.wait()
            receive.wait()
            assert torch.equal(received, _message(100_000, peer + key))


@pytest.mark.parametrize(
    "program",
    [receive_without_waiting, send_to_itself, receive_wrong_sizes, repeat_messages, wait_for_sends_first],
)
def test_messages_between_two_ranks(program: Any) -> None:
    run_ranks(program, 2, backend="dtcomm")


def test_every_rank_sends_to_every_other_without_shared_memory() -> None:
    run_ranks(exchange, 2, backend="dtcomm", env={"DTCOMM_RUNTIME": "process_group"})
