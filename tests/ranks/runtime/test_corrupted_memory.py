"""A rank that writes random values into the memory that it shares: its peers raise errors, they do not crash."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
import dtcomm.collectives as C
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.communicator import existing_communicator, get_communicator

SEEDS = int(os.environ.get("DTCOMM_TEST_SEEDS", "24"))
NUMEL = 70_000
HEADER_BYTES = 32 * 1024  # what csrc/engine/shm_layout.h puts in front of the payloads, and some of these
INTERESTING = [0, 1, 2, 7, 8, 63, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1]

Calls = list[Callable[[], object]]


@contextlib.contextmanager
def shared_region(group: Any) -> Iterator[mmap.mmap]:
    """What this rank shares with the other ranks of the group."""
    communicator = existing_communicator(group)
    assert communicator is not None
    runtime: Any = communicator.runtime
    descriptor = os.open(f"/proc/self/fd/{runtime.native.address()['region_fd']}", os.O_RDWR)
    with mmap.mmap(descriptor, 0) as memory:
        os.close(descriptor)
        yield memory


def write_random_words(memory: mmap.mmap, generator: random.Random, words: int) -> None:
    """Change words of the region, most of them of its headers, as a rank that is broken or hostile would."""
    for _ in range(words):
        limit = HEADER_BYTES if generator.random() < 0.8 else len(memory)
        offset = generator.randrange(0, limit - 8, 4)
        if generator.random() < 0.5:
            value = generator.choice(INTERESTING)
        else:
            value = struct.unpack_from("<Q", memory, offset)[0] ^ 1 << generator.randrange(64)
        struct.pack_into("<Q", memory, offset, value)


@contextlib.contextmanager
def corrupted_region(group: Any, seed: int) -> Iterator[Callable[[], None]]:
    """Corrupt what this rank shares with the group, in a thread, and whenever the function that this yields is called.

    How often the thread runs during calls depends on the machine, so that it alone may change nothing that matters.
    """
    stop = threading.Event()
    with shared_region(group) as memory:

        def write_until_stopped() -> None:
            generator = random.Random(seed)
            while not stop.wait(0.0003):
                write_random_words(memory, generator, 16)

        writing = threading.Thread(target=write_until_stopped)
        writing.start()
        generator = random.Random(SEEDS + seed)
        try:
            yield lambda: write_random_words(memory, generator, 128)
        finally:
            stop.set()
            writing.join()


def random_calls(group: Any, generator: random.Random) -> Calls:
    """Return calls of all kinds of hand-over: slots, positions that are sent, single copy, tensors that are shared."""
    tensor, whole = torch.ones(NUMEL), torch.ones(2 * NUMEL)
    shared = dtcomm.empty(NUMEL)
    shared.fill_(1)
    calls: Calls = [
        lambda: C.all_reduce(tensor, group=group),
        lambda: C.all_reduce(tensor, codec="int8", checksum=True, group=group),
        lambda: C.all_reduce(tensor, codec="topk:ratio=0.05", group=group),
        lambda: C.all_reduce(tensor, codec="randk:ratio=0.05", group=group),
        lambda: C.all_reduce(shared, group=group),
        lambda: C.broadcast(shared, 1, group=group),
        lambda: C.all_gather(whole, tensor, group=group),
        lambda: C.all_to_all(torch.empty(2 * NUMEL), whole, group=group),
    ]
    return generator.sample(calls, 6)


def call_beside_a_corrupting_rank(rank: int, world_size: int) -> list[str]:
    """Return what the calls of rank 0 ended with."""
    outcomes = []
    for seed in range(SEEDS):
        group = dist.new_group([0, 1])
        C.barrier(group=group)
        get_communicator(group).set_timeout(timedelta(seconds=0.3))
        dist.barrier()  # both ranks have left the group's barrier before one of them changes its memory
        calls = random_calls(group, random.Random(seed))
        with corrupted_region(group, seed) if rank == 1 else contextlib.nullcontext() as corrupt:
            outcome = "right"
            try:
                for call in 8 * calls:
                    if corrupt is not None:
                        corrupt()
                    call()
            except DtcommError as error:
                outcome = type(error).__name__
            outcomes.append(outcome)
            dtcomm.flight_record()
        dist.barrier()
        dist.destroy_process_group(group)
    return outcomes


def test_corrupted_memory_of_a_peer_ends_in_errors() -> None:
    outcomes = run_ranks(call_beside_a_corrupting_rank, 2, timeout=60 + 4 * SEEDS)[0]
    assert len(outcomes) == SEEDS
    assert outcomes.count("right") <= SEEDS - 2, outcomes  # 7 to 17 of 24 groups ended in an error
