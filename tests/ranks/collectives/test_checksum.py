"""``checksum=True``: every runtime detects a byte that changes in transit and names it."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm
import dtcomm.collectives as C
from bench.common.virtual_ranks import Simulation, run_simulated
from dtcomm import _C
from dtcomm.errors import CollectiveMismatch, PayloadCorrupt
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.torchdist.transport import GlooTransport, P2PMessage
from tests.unit.runtime.every_collective import OVER_GLOO
from tests.unit.runtime.simulated_cases import calls_per_rank, exact, make_case, require_finished

PATTERN = bytes(range(1, 129))


def test_crc32c_instruction_equals_the_tables() -> None:
    digits = torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8)
    for hardware in (True, False):
        assert _C.crc32c(digits.data_ptr(), 9, hardware) == 0xE3069283  # the catalogue's check value
    data = torch.randint(0, 256, (60_000,), dtype=torch.uint8)
    for count in [*range(70), 12_287, 12_288, 12_289, 24_576, 50_001]:
        for start in (0, 1, 7):
            at = data.data_ptr() + start
            assert _C.crc32c(at, count) == _C.crc32c(at, count, False), (count, start)


@pytest.mark.parametrize(("collective", "algorithm"), [("all_reduce", "two_shot"), ("all_reduce", "ring"),
                                                       ("broadcast", "tree"), ("all_gather", "halving")])  # fmt: skip
def test_flipped_bit_is_detected_unless_in_padding(collective: str, algorithm: str) -> None:
    generator = random.Random(5)
    detected = 0
    for seed in range(150):
        world = Simulation(
            ranks=generator.choice([2, 3, 4, 5]), seed=seed, corrupt_payload=generator.randrange(8)
        )
        case = make_case(generator, world.ranks, collective, algorithm, ["none"], [5000])
        operation = case.operations[0]
        checked = operation.shape._replace(checksum=True)
        case.operations = [
            type(of_rank)(shape=checked, schedule=of_rank.schedule, buffers=of_rank.buffers)
            for of_rank in case.operations
        ]
        outcomes = run_simulated(world, calls_per_rank([case]))
        fates = {outcome.status for outcome in outcomes}
        if "corrupt" in fates:
            detected += 1
            assert fates <= {"corrupt", "done"}, (world, outcomes)
            assert len({outcome.failed_rank for outcome in outcomes if outcome.status == "corrupt"}) == 1, (
                world
            )
            continue
        require_finished(outcomes, world)
        for rank in range(world.ranks):  # the flipped bit was in the padding
            assert torch.equal(torch.as_tensor(case.outputs[rank][0]), exact(case, rank, 0)), (world, rank)
    assert detected > 50


def flip_byte_of_pattern(path: Path) -> None:
    """Flip a byte at the only place in a shared memory that holds the pattern."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(PATTERN)
        assert at >= 0
        memory[at + 50] ^= 0x10


def shared_memory_files() -> list[Path]:
    paths = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            if "dtcomm-region" in os.readlink(entry.path):
                paths.append(Path(entry.path))
        except FileNotFoundError:
            continue
    return paths


def broadcast_damaged_payload(rank: int, world_size: int, flipped: bool) -> str:
    C.all_reduce(torch.ones(4), checksum=True)
    payload = torch.frombuffer(bytearray(PATTERN * 8), dtype=torch.uint8).clone()
    tensor = payload.clone() if rank == 0 else torch.zeros_like(payload)
    work = None
    if rank == 0:  # stages the payload and flips a byte before the other rank reads it
        work = C.broadcast(tensor, 0, algorithm="one_shot", checksum=True, async_op=True)
        work.wait()
        if flipped:
            flip_byte_of_pattern(shared_memory_files()[0])
    dist.barrier()
    try:
        if rank != 0:
            C.broadcast(tensor, 0, algorithm="one_shot", checksum=True)
        assert torch.equal(tensor, payload)
        dist.barrier()
        C.all_reduce(torch.ones(4))
    except PayloadCorrupt as error:
        if rank != 0:
            dist.barrier()
        return str(error)
    return ""


def test_byte_flipped_in_shared_memory_is_reported_on_every_rank() -> None:
    assert run_ranks(broadcast_damaged_payload, 2, False) == ["", ""]
    for error in run_ranks(broadcast_damaged_payload, 2, True):
        sender, _, damage = error.removeprefix("this communicator failed earlier: ").partition(
            " sent to rank 1 "
        )
        assert sender.startswith("what rank 0 (host "), error
        assert "arrived damaged: chunk 0 of piece 0 of operation 2, broadcast(1024 uint8" in damage


def run_calls(rank: int, world_size: int) -> list[torch.Tensor]:
    """Return the results of calls in every form; checksums must not change them and add 4 bytes per message."""
    results = []
    for spec in ("none", "int8", "topk:ratio=0.1"):
        x = torch.randn(30_000, generator=torch.Generator().manual_seed(rank))
        for name in ("one_shot", "two_shot", "ring", "tree"):
            if spec.startswith("topk") and name not in ("one_shot", "two_shot"):
                continue
            own = x.clone()
            C.all_reduce(own, codec=spec, algorithm=name)
            results.append(own)
    gathered = torch.empty(1000 * world_size)
    C.all_gather(gathered, torch.full((1000,), float(rank)))
    own = dtcomm.empty(100_000).fill_(rank)
    C.all_reduce(own)
    if rank < 2:
        message = torch.full((500,), float(rank))
        C.send(message, 1 - rank) if rank == 0 else C.recv(message, 0)
        results.append(message)
    return [*results, gathered, own.clone()]


def compare_checksums(rank: int, world_size: int) -> tuple[bool, int]:
    plain, before = run_calls(rank, world_size), C.info()["wire_bytes"]
    C.release()
    os.environ["DTCOMM_CHECKSUM"] = "1"
    checked, after = run_calls(rank, world_size), C.info()["wire_bytes"]
    C.release()
    return all(torch.equal(a, b) for a, b in zip(plain, checked, strict=True)), after - before


@pytest.mark.parametrize(
    "env", [{}, {"DTCOMM_TRANSPORT": "sockets"}, OVER_GLOO], ids=["native", "sockets", "process_group"]
)
def test_variable_enables_checksums_without_changing_results(env: dict[str, str]) -> None:
    for same, more in run_ranks(compare_checksums, 3, env=env):
        assert same
        assert 0 < more < 10_000 and more % 4 == 0


def reduce_with_unequal_options(rank: int, world_size: int) -> str:
    try:
        C.all_reduce(torch.ones(2000), checksum=rank == 0)
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_ranks_with_unequal_checksum_options_mismatch() -> None:
    for error in run_ranks(reduce_with_unequal_options, 2):
        assert "two_shot, checksum)" in error or "one_shot, checksum)" in error


def test_checksum_must_be_a_bool_or_none() -> None:
    assert run_ranks(wrong_argument, 1) == ["checksum: expected True, False or None, got 'yes'"]


def wrong_argument(rank: int, world_size: int) -> str:
    try:
        C.all_reduce(torch.ones(3), checksum="yes")  # type: ignore[arg-type]
    except TypeError as error:
        return str(error)
    return ""


class DamagedLoopback:
    """A group that delivers messages to their sender, with the byte at ``damage`` changed."""

    def __init__(self, damage: int | None) -> None:
        self.damage = damage
        self.sent: list[torch.Tensor] = []

    def rank(self) -> int:
        return 1

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.sent.append(tensors[0].clone())
        if self.damage is not None:
            self.sent[-1][self.damage] ^= 1
        return SimpleNamespace(wait=lambda timeout: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda timeout: tensors[0].copy_(self.sent.pop(0)))


@pytest.mark.parametrize("damage", [None, 0, 63, 64, 67])
def test_damaged_message_over_gloo_is_detected(damage: int | None) -> None:
    names = ["rank 0 (pid 7)", "rank 1 (pid 8)"]
    transport = GlooTransport(DamagedLoopback(damage), names, 5.0, object())
    payload, arrived = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    sends, receives = [P2PMessage(payload, 0, 5)], [P2PMessage(arrived, 0, 5)]
    handle = transport.send_recv(sends, receives, True, "round 3")
    if damage is None:
        transport.wait(handle)
        assert torch.equal(arrived, payload)
        return
    with pytest.raises(
        PayloadCorrupt, match=r"what rank 0 \(pid 7\) sent to rank 1 \(pid 8\) .* receiving round 3"
    ):
        transport.wait(handle)
