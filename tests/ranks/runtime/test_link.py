"""Emulated links: the syntax of DTCOMM_EMULATE_LINK, the emulated network card, and arrival times in the engine."""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm import _C
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime import emulated_link
from dtcomm.runtime.emulated_link import FRAME, PAYLOAD, Link, Links, parse


def test_links_are_parsed() -> None:
    ten = Link(bits_per_second=10e9, latency_s=50e-6)
    assert parse("") == Links() and not parse("")
    assert parse("10gbit,50us") == Links(inside=ten, between=ten) == parse(" 10Gbit , 50µs ")
    assert parse("between=10gbit,50us") == Links(between=ten)
    assert parse("inside=1.5tbit; between=10gbit,0.05ms") == Links(
        inside=Link(bits_per_second=1.5e12), between=ten
    )
    assert Link(bits_per_second=8e9).ns_per_byte == pytest.approx(FRAME / PAYLOAD)


def test_cpu_cost_per_byte_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < emulated_link.tcp_ns_per_byte() < 100
    monkeypatch.setattr(emulated_link, "tcp_ns_per_byte", lambda: 0.4)

    def cost(text: str) -> float:
        link = parse(text).between
        return link.cpu_ns_per_byte()

    assert [cost(text) for text in ("10gbit", "50gbit,2us", "100gbit,2us")] == [0.4, 0.4, 0.0]
    assert [cost(f"100gbit,2us,{word}") for word in ("tcp", "RDMA", "1.5ns/byte", "2ns/B")] == [
        0.4,
        0,
        1.5,
        2,
    ]
    assert cost("10gbit,2us,rdma") == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10", "'10' is not a rate"),
        ("0gbit", "'0gbit' is not a rate"),
        ("10gbit,50", "'50' is not a latency"),
        ("10gbit,50us,1500", "'1500' is not tcp, rdma, or a cost such as 0.5ns/byte"),
        ("10gbit,50us,tcp,1500", "more than a rate, a latency and a cost"),
        ("outside=1gbit", "'outside' is not one of inside, between"),
        ("inside=1gbit;inside=2gbit", "each at most once"),
        ("inside=1gbit;", "'' is not one of"),
    ],
)
def test_invalid_links_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"DTCOMM_EMULATE_LINK=.*valid are '10gbit,50us' and") as raised:
        parse(text)
    assert reason in str(raised.value)


def test_messages_share_the_bandwidth_in_any_order() -> None:
    """No message arrives earlier than it would alone, and the last one when the card has carried all of them."""
    nic = _C.EmulatedNic(1)
    base = time.monotonic_ns() + 10**12
    assert [nic.send(base, 100), nic.send(base, 50), nic.send(base + 500, 10)] == [
        base,
        base + 100,
        base + 500,
    ]
    generator = random.Random(3)
    for _ in range(200):
        base += 10**6
        messages = [
            (base + generator.randrange(2000), generator.randrange(1, 300))
            for _ in range(generator.randrange(1, 12))
        ]
        ends = [nic.receive(first, busy) for first, busy in messages]
        for (first, busy), end in zip(messages, ends, strict=True):
            assert end >= first + busy
        free = 0
        for first, busy in sorted(messages):
            free = max(free, first) + busy
        assert max(ends) == free


def time_all_reduce(rank: int, world_size: int, numel: int, repeats: int) -> tuple[float, float, str]:
    """Return the seconds per call, the CPU seconds per second, and the runtime.

    A late rank finds the others' bytes already there, but not in two calls in a row, hence ``repeats - 1``.
    """
    x = torch.ones(numel)
    C.all_reduce(x)
    cpu, started = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        C.all_reduce(x)
    seconds = time.perf_counter() - started
    return seconds / (repeats - 1), (time.process_time() - cpu) / seconds, str(C.info()["runtime"])


def test_bytes_take_cpu_time_of_both_ends() -> None:
    # 4 MB out and 4 MB in a call, 20 ns each: 160 ms of CPU time, which the 0.3 ms of the wire do not hide.
    env = {"DTCOMM_RUNTIME": "native", "DTCOMM_EMULATE_LINK": "100gbit,1us,20ns/byte"}
    for seconds, cpu, _ in run_ranks(time_all_reduce, 2, 1_000_000, 3, env=env):
        assert seconds >= 0.08 and cpu * seconds >= 0.04
    free = {**env, "DTCOMM_EMULATE_LINK": "100gbit,1us,rdma"}
    assert all(
        cpu * seconds < 0.04 for seconds, cpu, _ in run_ranks(time_all_reduce, 2, 1_000_000, 3, env=free)
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_message_arrives_early(ranks: int) -> None:
    env = {"DTCOMM_RUNTIME": "native", "DTCOMM_EMULATE_LINK": "1gbit,2ms"}
    for seconds, cpu, runtime in run_ranks(time_all_reduce, ranks, 1_000_000, 4, env=env):
        assert runtime == "native"
        minimum = 2 * (ranks - 1) / ranks * 4e6 * 8e-9 * FRAME / PAYLOAD + 2e-3
        assert minimum <= seconds < 4 * minimum + 0.5
        assert cpu < 0.9, "waiting gives the core away"


@pytest.mark.parametrize(
    ("link", "latency_s", "slow"), [("between=1gbit,2s", 2, False), ("inside=1gbit,20ms", 0.02, True)]
)
def test_ranks_of_one_host_use_the_inside_link(link: str, latency_s: float, slow: bool) -> None:
    for seconds, _, _ in run_ranks(time_all_reduce, 2, 1000, 4, env={"DTCOMM_EMULATE_LINK": link}):
        assert (seconds >= latency_s) == slow


def time_between_hosts(rank: int, world_size: int) -> tuple[float, float, str]:
    os.environ["DTCOMM_HOST_ID"] = f"host {rank}"
    return time_all_reduce(rank, world_size, 1000, 4)


def test_ranks_of_different_hosts_use_the_between_link() -> None:
    env = {"DTCOMM_EMULATE_LINK": "inside=1kbit;between=1gbit,20ms", "DTCOMM_RUNTIME": "native"}
    for seconds, _, runtime in run_ranks(time_between_hosts, 2, env=env):
        assert runtime == "native" and 0.02 <= seconds < 2  # 1 kbit/s would take 32 s


def change_the_link(rank: int, world_size: int) -> float:
    C.info()  # after it this rank has connected, and after the barrier the other has, too
    work = C.all_reduce(torch.ones(10_000), async_op=True)  # 40 kB take minutes
    assert work is not None
    dist.barrier()
    C.release()
    with pytest.raises(DtcommError):
        work.wait()
    dist.barrier()
    os.environ["DTCOMM_EMULATE_LINK"] = "100gbit,1us"
    started = time.perf_counter()
    C.all_reduce(torch.ones(10_000))
    return time.perf_counter() - started


def test_traffic_of_closed_communicators_does_not_delay_others() -> None:
    env = {"DTCOMM_EMULATE_LINK": "1kbit", "DTCOMM_RUNTIME": "native"}
    assert max(run_ranks(change_the_link, 2, env=env, timeout=60)) < 10


def reduce_refused(rank: int, world_size: int) -> str:
    with pytest.raises(DtcommError) as raised:
        C.all_reduce(torch.ones(10))
    return str(raised.value)


def test_only_the_engine_emulates_links() -> None:
    for error in run_ranks(
        reduce_refused, 2, env={"DTCOMM_EMULATE_LINK": "1gbit", "DTCOMM_RUNTIME": "process_group"}
    ):
        assert error.startswith(
            "DTCOMM_EMULATE_LINK: only the native engine emulates links, but rank 0 (host "
        )
        assert error.endswith("DTCOMM_RUNTIME=process_group")


def reduce_buckets(rank: int, world_size: int, same: bool) -> list[tuple[bool, list[dict[str, Any]]]]:
    results = []
    for spec in ("none", "int8"):
        tensors = [torch.full((300_000,), float(rank + i)) for i in range(5)]
        if same:
            tensors = [tensors[0]] * 5
        C.all_reduce_coalesced(tensors, codec=spec, bucket_bytes=10**6)
        if same:
            expected = [torch.full((300_000,), 16.0)] * 5  # (0 + 1) doubled by every further message
        else:
            expected = [torch.full((300_000,), float(1 + 2 * i)) for i in range(5)]
        correct = all((a - b).abs().max() < 0.2 for a, b in zip(tensors, expected, strict=True))
        operations = [
            operation for record in C.flight_record()["communicators"] for operation in record["operations"]
        ]
        results.append((bool(correct), operations[-5:]))
    return results


@pytest.mark.parametrize("same", [False, True], ids=["other tensors", "the same tensor"])
def test_buckets_overlap_unless_they_share_a_tensor(same: bool) -> None:
    env = {"DTCOMM_RUNTIME": "native", "DTCOMM_EMULATE_LINK": "500mbit,10ms"}
    for results in run_ranks(reduce_buckets, 2, same, env=env):
        for correct, operations in results:
            assert correct
            assert [operation["numel"] for operation in operations] == [300_000] * 5
            early = sum(after["started"] < before["finished"] for before, after in pairwise(operations))
            assert early == 0 if same else early >= 2, "only one tensor keeps them apart"
