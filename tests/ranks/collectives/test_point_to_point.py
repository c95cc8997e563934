"""send and recv between any two ranks: in order, without the other ranks, started before the peer arrives."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.codecs import codec
from dtcomm.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from dtcomm.runtime.native.copy_policy import piece_bytes
from dtcomm.runtime.types import OpSpec, TensorSpec


def exchange_messages(rank: int, n: int) -> int:
    right, left = (rank + 1) % n, (rank - 1) % n
    incoming = [torch.empty(1000 * i + 1) for i in range(6)]
    outgoing = [torch.full((1000 * i + 1,), float(100 * rank + i)) for i in range(6)]
    # All ranks start all messages before any rank waits, and before any connection exists.
    works = [collectives.send(tensor, right, async_op=True) for tensor in outgoing]
    works += [collectives.recv(tensor, left, async_op=True) for tensor in incoming]
    futures = [work.get_future() for work in works if work is not None]
    assert [future.wait()[0].numel() for future in futures[6:]] == [tensor.numel() for tensor in incoming]
    for work in works:
        work.wait()
        assert work.is_completed() and work.wire_bytes >= 0 and work.seconds >= 0
    for i, tensor in enumerate(incoming):
        assert tensor.eq(100 * left + i).all()
    if rank < 2:  # the other ranks take no part
        peer = 1 - rank
        for spec in ("none", "fp16", "int8", "int8:round=stochastic"):
            payload = torch.randn(70_001, generator=torch.Generator().manual_seed(rank))
            residual, before = torch.zeros(70_001), payload.clone()
            received = torch.empty(70_001)
            if rank == 0:
                collectives.send(payload, peer, codec=spec, residual=residual)
                assert torch.equal(payload, before)
                collectives.send(residual, peer)
                collectives.recv(received, peer, codec=spec)
            else:
                collectives.recv(received, peer, codec=spec)
                collectives.recv(residual, peer)
                collectives.send(payload, peer, codec=spec)
                expected = torch.randn(70_001, generator=torch.Generator().manual_seed(peer))
                assert torch.allclose(received + residual, expected, atol=1e-6)
        collectives.send(torch.arange(3), peer) if rank == 0 else collectives.recv(torch.arange(3), peer)
    group = dist.new_group([n - 1, 0])
    if rank in (0, n - 1):
        word = torch.tensor([rank], dtype=torch.int16)
        if rank == 0:
            collectives.send(word, n - 1, group=group)
        else:
            collectives.recv(word, 0, group=group)
            assert word.item() == 0
    collectives.release()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("runtime", ["auto", "process_group"])
def test_messages_arrive_in_order_without_other_ranks(n: int, runtime: str) -> None:
    run_ranks(exchange_messages, n, env={"DTCOMM_RUNTIME": runtime} if runtime != "auto" else {})


def exchange_around_a_ring(rank: int, n: int) -> None:
    right, left = (rank + 1) % n, (rank - 1) % n
    for repetition in range(3):  # from the second one on, small messages are sent at once
        for numel in (0, 10, 4097, 300_000):
            # Every rank sends another number of elements.
            x = torch.full((numel + rank,), float(rank + repetition))
            output = torch.full((numel + left,), torch.nan)
            collectives.sendrecv(x, right, output, left)
            x.fill_(-1.0)
            assert output.eq(left + repetition).all()
    values = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
    residual, received = torch.zeros(5000), torch.empty(5000)
    collectives.sendrecv(values, right, received, left, codec="int4", residual=residual)
    expected = torch.randn(5000, generator=torch.Generator().manual_seed(left))
    errors = torch.empty(5000)
    collectives.sendrecv(residual, right, errors, left)
    assert torch.allclose(received + errors, expected, atol=1e-6) and residual.abs().max() > 0.01
    # A rank that sends and one that receives are a sendrecv's counterparts too.
    if n == 2:
        if rank == 0:
            collectives.sendrecv(values, 1, received, 1)
        else:
            work = collectives.send(values, 0, async_op=True)
            collectives.recv(received, 0)
            work.wait()
        assert torch.equal(received, expected)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("runtime", ["auto", "process_group"])
def test_every_rank_sends_and_receives_at_once(n: int, runtime: str) -> None:
    run_ranks(exchange_around_a_ring, n, env={"DTCOMM_RUNTIME": runtime} if runtime != "auto" else {})


def check_refusals(rank: int, n: int) -> str:
    x, peer = torch.ones(8), 1 - rank
    for kind, pattern, call in (
        (ValueError, "dst: rank 7 is not in the group; its ranks are 0, 1", lambda: collectives.send(x, 7)),
        (ValueError, f"src: rank {rank} is this rank itself", lambda: collectives.recv(x, rank)),
        (TypeError, "tensor: expected a torch.Tensor", lambda: collectives.send(None, peer)),  # type: ignore[arg-type]
        (TypeError, "codec int8 takes", lambda: collectives.send(x.double(), peer, codec="int8")),
        (ValueError, "residual: has 3", lambda: collectives.send(x, peer, residual=torch.ones(3))),
        (TypeError, "output: expected a torch.Tensor", lambda: collectives.sendrecv(x, peer, None, peer)),  # type: ignore[arg-type]
        (TypeError, "tensor: expected a torch.Tensor", lambda: collectives.sendrecv(None, peer, x, peer)),  # type: ignore[arg-type]
        (ValueError, "dst: rank 7 is not in the group", lambda: collectives.sendrecv(x, 7, x, peer)),
        (ValueError, "src: rank 7 is not in the group", lambda: collectives.sendrecv(x, peer, x, 7)),
        (
            TypeError,
            "codec int8 takes",
            lambda: collectives.sendrecv(x, peer, x.double(), peer, codec="int8"),
        ),
        (ValueError, "use send and recv", lambda: collectives.sendrecv(x, peer, x, peer, codec="lossless")),
    ):
        with pytest.raises(kind, match=pattern):
            call()
    try:
        if rank == 0:
            collectives.send(x, 1)
        else:
            collectives.recv(torch.empty(9), 0)
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_invalid_calls_are_refused() -> None:
    errors = run_ranks(check_refusals, 2)
    assert "send(8 float32" in errors[1] and "send(9 float32" in errors[1]


def receive_from_dead_peer(rank: int, n: int) -> Any:
    if rank == 1:
        collectives.send(torch.ones(3), 0)
        send_to_parent("sent")
        time.sleep(60)
    collectives.recv(torch.empty(3), 1)
    try:
        collectives.recv(torch.empty(3), 1)
    except (PeerLost, CollectiveTimeout) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_dead_peer_is_named() -> None:
    with spawn_ranks(receive_from_dead_peer, 2, group_timeout=20.0) as ranks:
        assert ranks.receive(1) == "sent"
        ranks.kill(1)
        outcome = ranks.join(30)[0]
    assert outcome.ok and "PeerLost: rank 1" in outcome.result, outcome


def send_to_absent_peer(rank: int, n: int) -> str:
    if rank == 1:
        time.sleep(6.0)
        return ""
    work = collectives.send(torch.ones(3), 1, async_op=True)
    assert work is not None and not work.is_completed()
    try:
        work.wait()
    except CollectiveTimeout as error:
        return str(error)
    return "no error"


def test_missing_peer_is_named() -> None:
    with spawn_ranks(send_to_absent_peer, 2, group_timeout=4.0) as ranks:
        outcome = ranks.join(30)[0]
    assert outcome.ok and outcome.result.startswith("rank 1 did not come"), outcome


def test_large_messages_are_split_into_pieces() -> None:
    for numel in (2**17, 2**18, 2**20, 2**24):
        shape = OpSpec("broadcast", "sum", (TensorSpec(numel, torch.float32, codec("none")),), "send")
        assert 8 <= 4 * numel / piece_bytes(shape, 2) <= 4 * numel / 2**16
