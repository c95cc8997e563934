"""Receivers that read the senders' own memory: results, how long a sender waits, deaths, what the kernel refuses."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.errors import DtcommError, PeerLost
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from dtcomm.measure import exact_inputs
from tests.support.forbidden_calls import CANNOT_FORBID, forbid
from tests.support.rank_tests import on_ranks

ON = {"DTCOMM_SINGLE_COPY": "on"}


def run_single_copy(rank: int, n: int) -> int:
    root, peer = n - 1, rank ^ 1
    for count in (0, 1, 1000, 50_001, 300_000):

        def tensor_for(collective: str, shards: int, count: int = count) -> torch.Tensor:
            return exact_inputs.inputs(collective, count, rank=rank, world_size=n).clone().view(shards, count)

        def check(collective: str, result: torch.Tensor, *sources: torch.Tensor, count: int = count) -> None:
            for source in sources:
                source.fill_(float("nan"))  # a later read would return NaN
            expected = exact_inputs.expected(collective, count, rank=rank, world_size=n, root=root)
            assert exact_inputs.count_mismatches(result.reshape(-1)[: expected.numel()], expected) == 0, (
                collective,
                count,
            )

        tensor = tensor_for("broadcast", 1)
        collectives.broadcast(tensor, root)
        check("broadcast", tensor)
        source, output = tensor_for("gather", 1), torch.empty(count * n)
        collectives.gather(source, output if rank == root else None, root)
        if rank == root:
            check("gather", output, source)
        source, output = tensor_for("scatter", n), torch.empty(count)
        collectives.scatter(output, source.view(-1) if rank == root else None, root)
        check("scatter", output, source)
        source, output = tensor_for("all_to_all", n), torch.empty(n, count)
        work = collectives.all_to_all(output, source, async_op=True)
        work.wait()
        check("all_to_all", output, source)
        gathered = torch.empty(count * n)
        shard = gathered[count * rank : count * (rank + 1)].copy_(tensor_for("all_gather", 1)[0])
        collectives.all_gather(gathered, shard)  # in place
        check("all_gather", gathered)
        rows = [[(src * 7 + dst * 3) % 5 * count // 4 for dst in range(n)] for src in range(n)]
        received_rows = [row[rank] for row in rows]
        source, output = torch.full((sum(rows[rank]),), float(rank)), torch.empty(sum(received_rows))
        collectives.all_to_all(output, source, received_rows, rows[rank])
        source.fill_(-1.0)
        for src, part in enumerate(output.split(received_rows)):
            assert part.eq(src).all()
        if peer < n:
            source, output = tensor_for("sendrecv", 1), torch.empty(count)
            for sends in (rank < peer, rank > peer):
                collectives.send(source, peer) if sends else collectives.recv(output, peer)
            source.zero_()
            expected = exact_inputs.inputs("sendrecv", count, rank=peer, world_size=n)
            assert exact_inputs.count_mismatches(output, expected) == 0
    info = collectives.info()
    assert info["single_copy"] == "process_vm_readv"
    bytes: int = info["pulled_bytes"]
    return bytes


@pytest.mark.parametrize("n", [2, 3])
def test_ordinary_tensors_are_read_from_the_senders_memory(n: int) -> None:
    assert min(run_ranks(run_single_copy, n, env=ON)) > 300_000 * 4


def gather_staged(rank: int, n: int) -> dict[str, Any]:
    out, x = torch.empty(2_000_000 * n), torch.full((2_000_000,), float(rank))
    collectives.all_gather(out, x)
    collectives.all_gather(out, x, codec="fp16")
    assert out.view(n, -1)[1].eq(1).all()
    return collectives.info()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"DTCOMM_SINGLE_COPY": "off"}, "DTCOMM_SINGLE_COPY=off"),
        ({"DTCOMM_EMULATE_LINK": "100gbit,1us"}, "a link is emulated"),
    ],
)
def test_reason_of_staging_is_reported(variables: dict[str, str], reason: str) -> None:
    for info in run_ranks(gather_staged, 2, env=variables):
        assert (info["single_copy"], info["pulled_bytes"]) == (reason, 0)


@on_ranks(2, env={**ON, "DTCOMM_EMULATE_LINK": "10gbit,5us"})
def test_forced_single_copy_over_an_emulated_link_is_refused(rank: int, n: int) -> None:
    with pytest.raises(DtcommError, match="DTCOMM_SINGLE_COPY=on, but a link is emulated"):
        collectives.barrier()


def slow_reader(rank: int, n: int, numel: int) -> float:
    """Return when, by the clock of all processes, the sender returned and the reader arrived."""
    x = torch.full((numel,), 3.0)
    collectives.sendrecv(x[:1], 1 - rank, x[1:2], 1 - rank)  # connects the two
    collectives.barrier()
    if rank == 0:
        collectives.send(x, 1)
        returned = time.monotonic()
        x.zero_()
        return returned
    time.sleep(0.2)
    arrived = time.monotonic()
    collectives.recv(x.zero_(), 0)
    assert x.eq(3).all()
    return arrived


def test_sender_of_a_large_message_returns_after_its_memory_was_read() -> None:
    returned, arrived = run_ranks(slow_reader, 2, 3_000_000, env=ON)
    assert returned >= arrived


@pytest.mark.parametrize("numel", [10_000, 300_000, 524_288])
@on_ranks(2, env=ON)
def test_sender_of_a_message_that_fits_into_the_slots_does_not_wait_for_its_receiver(
    rank: int, n: int, numel: int
) -> None:
    x, returned = torch.full((numel,), 3.0), torch.zeros(1)
    collectives.sendrecv(x[:1], 1 - rank, x[1:2], 1 - rank)  # connects the two
    if rank == 0:
        collectives.send(x, 1)
        dist.send(returned, 1)
    else:
        dist.recv(returned, 0)  # by Gloo: never, if the sender waits
        collectives.recv(x.zero_(), 0)
        assert x.eq(3).all()


@on_ranks(2, env=ON)
def test_offers_that_are_taken_and_withdrawn_at_random(rank: int, n: int) -> None:
    """Both ranks send before they receive, at varying moments: offers are taken and withdrawn."""
    generator = random.Random(rank)
    peer = 1 - rank
    out = torch.empty(300_000)
    collectives.sendrecv(torch.zeros(1), peer, torch.empty(1), peer)  # connects the two
    for number in range(300):
        x = torch.full((300_000,), float(2 * number + rank))
        for _ in range(generator.randrange(400)):
            time.perf_counter()
        work = collectives.send(x, peer, async_op=True) if number % 2 else collectives.send(x, peer)
        collectives.recv(out, peer)
        assert out.eq(2 * number + peer).all(), number
        if work is not None:
            work.wait()
        x.fill_(-1.0)
    return collectives.info()["pulled_bytes"]


def gather_until_loss(rank: int, n: int) -> str:
    x, out = torch.ones(1_000_000), torch.empty(1_000_000 * n)
    collectives.all_gather(out, x)
    send_to_parent("running")
    try:
        while True:
            collectives.all_gather(out, x)
    except PeerLost as error:
        return str(error)


def test_rank_that_dies_during_reads_is_named() -> None:
    with spawn_ranks(gather_until_loss, 3, env=ON, group_timeout=20.0) as ranks:
        for rank in range(3):
            assert ranks.receive(rank) == "running"
        time.sleep(0.1)
        ranks.kill(1)
        outcomes = ranks.join(30)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank]
        assert "rank 1 (host" in outcomes[rank].result and "is gone" in outcomes[rank].result


def meet_with_forbidden_rank(rank: int, n: int) -> str:
    errors = []

    def meet() -> None:  # seccomp rules apply to a thread
        if rank == 1 and (reason := forbid("process_vm_readv")):
            errors.append(reason)
        try:
            collectives.barrier()
        except DtcommError as error:
            errors.append(str(error))

    thread = threading.Thread(target=meet)
    thread.start()
    thread.join()
    return "; ".join(errors)


def test_single_copy_is_refused_if_one_rank_lacks_permission() -> None:
    errors = run_ranks(meet_with_forbidden_rank, 3, env=ON)
    if errors[1].startswith(CANNOT_FORBID):
        pytest.skip(errors[1])
    for text in errors:
        assert text.startswith("DTCOMM_SINGLE_COPY=on, but process_vm_readv of rank 0 (host"), text
        assert "Operation not permitted (kernel.yama.ptrace_scope" in text
