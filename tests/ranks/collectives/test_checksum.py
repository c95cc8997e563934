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
from dtcomm import _C
from dtcomm.errors import CollectiveMismatch, PayloadCorrupt
from dtcomm.launch.ranks import run_ranks
from dtcomm.measure.virtual_ranks import Simulation, run_simulated
from dtcomm.runtime.torchdist.transport import GlooTransport, P2PMessage
from tests.unit.runtime.every_collective import OVER_GLOO
from tests.unit.runtime.simulated_cases import exact, finished, make, together

PATTERN = bytes(range(1, 129))


def test_the_instruction_and_the_tables_agree() -> None:
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
def test_a_flipped_bit_is_found_or_was_in_the_padding(collective: str, algorithm: str) -> None:
    generator = random.Random(5)
    detected = 0
    for seed in range(150):
        world = Simulation(
            ranks=generator.choice([2, 3, 4, 5]), seed=seed, corrupt_payload=generator.randrange(8)
        )
        case = make(generator, world.ranks, collective, algorithm, ["none"], [5000])
        operation = case.operations[0]
        checked = operation.shape._replace(checksum=True)
        case.operations = [
            type(of_rank)(shape=checked, schedule=of_rank.schedule, buffers=of_rank.buffers)
            for of_rank in case.operations
        ]
        outcomes = run_simulated(world, together([case]))
        fates = {outcome.status for outcome in outcomes}
        if "corrupt" in fates:
            detected += 1
            assert fates <= {"corrupt", "done"}, (world, outcomes)
            assert len({outcome.failed_rank for outcome in outcomes if outcome.status == "corrupt"}) == 1, (
                world
            )
            continue
        finished(outcomes, world)
        for rank in range(world.ranks):  # nothing that anybody reads was hit
            assert torch.equal(torch.as_tensor(case.outputs[rank][0]), exact(case, rank, 0)), (world, rank)
    assert detected > 50


def plant(path: Path) -> None:
    """Flip a byte at the only place in a shared memory that holds the pattern."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(PATTERN)
        assert at >= 0
        memory[at + 50] ^= 0x10


def areas() -> list[Path]:
    paths = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            if "dtcomm-region" in os.readlink(entry.path):
                paths.append(Path(entry.path))
        except FileNotFoundError:
            continue
    return paths


def damaged_in_memory(rank: int, world_size: int, flipped: bool) -> str:
    C.all_reduce(torch.ones(4), checksum=True)
    payload = torch.frombuffer(bytearray(PATTERN * 8), dtype=torch.uint8).clone()
    tensor = payload.clone() if rank == 0 else torch.zeros_like(payload)
    work = None
    if rank == 0:  # sends into its memory, then something changes it before the others look
        work = C.broadcast(tensor, 0, algorithm="one_shot", checksum=True, async_op=True)
        work.wait()
        if flipped:
            plant(areas()[0])
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


def test_a_byte_flipped_in_shared_memory_is_named_on_every_rank() -> None:
    assert run_ranks(damaged_in_memory, 2, False) == ["", ""]
    for error in run_ranks(damaged_in_memory, 2, True):
        sent, _, rest = error.removeprefix("this communicator failed earlier: ").partition(" sent to rank 1 ")
        assert sent.startswith("what rank 0 (host "), error
        assert "arrived damaged: chunk 0 of piece 0 of operation 2, broadcast(1024 uint8" in rest


def everything(rank: int, world_size: int) -> list[torch.Tensor]:
    """Run the same calls with and without checksums: results must be equal, and bytes differ by 4 per message."""
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


def with_and_without(rank: int, world_size: int) -> tuple[bool, int]:
    plain, before = everything(rank, world_size), C.info()["wire_bytes"]
    C.release()
    os.environ["DTCOMM_CHECKSUM"] = "1"
    checked, after = everything(rank, world_size), C.info()["wire_bytes"]
    C.release()
    return all(torch.equal(a, b) for a, b in zip(plain, checked, strict=True)), after - before


@pytest.mark.parametrize(
    "env", [{}, {"DTCOMM_TRANSPORT": "sockets"}, OVER_GLOO], ids=["native", "sockets", "process_group"]
)
def test_the_variable_turns_it_on_and_changes_no_result(env: dict[str, str]) -> None:
    for same, more in run_ranks(with_and_without, 3, env=env):
        assert same
        assert 0 < more < 10_000 and more % 4 == 0


def disagreeing(rank: int, world_size: int) -> str:
    try:
        C.all_reduce(torch.ones(2000), checksum=rank == 0)
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_it_is_the_same_on_all_ranks_or_a_mismatch() -> None:
    for error in run_ranks(disagreeing, 2):
        assert "two_shot, checksum)" in error or "one_shot, checksum)" in error


def test_what_it_takes() -> None:
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
def test_a_damaged_message_over_gloo_is_found(damage: int | None) -> None:
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
