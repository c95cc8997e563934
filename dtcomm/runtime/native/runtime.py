"""The native engine as a runtime: ranks of one host over shared memory, those of several over sockets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dtcomm import _C, env
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.errors import DtcommError
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.emulated_link import Link, links
from dtcomm.runtime.flight_recorder import STAGES, FlightEntry, PeerSnapshot
from dtcomm.runtime.native.chunk_size import (
    SLOT_BYTES,
    is_direct,
    may_be_pulled,
    message_piece,
    piece_bytes,
    tensor_bytes,
)
from dtcomm.runtime.types import GEOMETRY, OPS, Buffers, OpHooks, OpSpec
from dtcomm.runtime.work import NativeWork, Work
from dtcomm.schedule import Schedule, lower

LARGEST_SLOT_BYTES = 8 * 2**20
LEAST_DIRECT = 128 * 1024  # bytes of a tensor that peers copy from the tensor itself
# Bytes of a tensor that peers copy out of its owner's memory. The kernel copies page by page: huge ones at up to
# 28 GB/s, those of 4 KiB at 13, which is more work than to stage them and copy again.
LEAST_PULLED = 4 * 2**20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Before a rank sleeps. A core that others share is theirs at each yield, and a sleeper on it is not always run at once
# when it is woken: in the 1 ms it is, on most messages, not yet asleep.
YIELD_US, SHARED_YIELD_US = 50.0, 1000.0
LEAST_BOXES = 128  # of 4 KiB fill a slot: a user's own schedule may need as many


class NativeRuntime:
    """Shared memory areas of the ranks of this host, and connections to those of other hosts."""

    name = "native"

    def __init__(self, rank: int, ranks: int, timeout_s: float, slot_bytes: int = SLOT_BYTES) -> None:
        self.rank = rank
        self.ranks = ranks
        self._recorded = False
        self._crowded = False  # ranks share cores
        self.transport = "memory"
        self.single_copy = "not asked for yet"  # why there is none; empty where there is
        found = links()
        self._link = found.inside
        self._slot_bytes = slot_bytes if self._link is None else max(slot_bytes, _slot_bytes(self._link))
        self.native = _C.NativeCommunicator(
            rank=rank,
            ranks=ranks,
            max_boxes=_boxes(ranks),
            slot_bytes=self._slot_bytes,
            timeout_s=timeout_s,
            yield_us=YIELD_US,
            inside=_rate(found.inside),
            between=_rate(found.between),
        )

    def address(self) -> list[int]:
        """What a peer needs to map this rank's area: plain numbers."""
        return list(self.native.address())

    def attach(
        self,
        addresses: Sequence[Sequence[int]],
        names: Sequence[str],
        cores: int,
        sockets: Mapping[int, int] | None = None,
        inside: Sequence[int] | None = None,
    ) -> None:
        """Map the areas of all ranks but those that ``sockets`` are connected to, by rank; they belong to the engine
        from here on. OSError or RuntimeError where one cannot be reached.

        ``cores``, the same on all ranks: how many the ranks of a host may run on together; ``inside`` are the ranks
        of this host (None: all).
        """
        sockets = sockets or {}
        here = range(self.ranks) if inside is None else inside
        self.native.attach(
            [
                (*address, sockets.get(rank, -1), rank not in here, name)
                for rank, (address, name) in enumerate(zip(addresses, names, strict=True))
            ]
        )
        if sockets:
            self.transport = "sockets" if len(sockets) == self.ranks - 1 else "memory and sockets"
        # Ranks that share a core must give it away to get on; a look at sockets costs as much as many at memory.
        self._crowded = cores < len(here)
        spins = 32 if sockets else 64 if self._crowded else 1000
        self.native.set_wait_policy(
            int(env.get("DTCOMM_SPINS")) or spins,
            float(env.get("DTCOMM_YIELD_US")) or (SHARED_YIELD_US if self._crowded else YIELD_US),
        )
        # Otherwise the progress thread has a core of its own, and both get on at once.
        self.native.waiters_help_progress = cores < 2 * len(here)
        # A probe whose partner is not running gives up: also ranks that share cores can have it.
        self.native.probes_staging = (
            env.get("DTCOMM_STAGING") == "auto" and self._link is None and not sockets
        )
        self.native.stream_staging = env.get("DTCOMM_STAGING") == "streaming"

    def why_no_single_copy(self) -> str:
        """Why receivers should not copy out of this rank's memory, or it not out of theirs; empty where they may."""
        chosen = env.get("DTCOMM_SINGLE_COPY")
        if chosen == "off":
            return "DTCOMM_SINGLE_COPY=off"
        if self._link is not None:
            return "a link is emulated"
        if self.transport != "memory":
            return "not all ranks share memory"
        why = self.native.single_copy_error()
        if not why and chosen == "auto" and not self._crowded:
            return "every rank has a core, and two copies on two cores take less time than one by the kernel"
        if not why and chosen == "auto" and not _has_huge_pages():
            return "tensors lie in small pages, which take longer to read than to stage; see THP_MEM_ALLOC_ENABLE=1"
        return why

    def prepare(self, spec: OpSpec, schedule: Schedule) -> _C.NativePlan:
        """A plan for calls of this shape."""
        # What ranks read in each other's tensors would come over no link.
        shared = self.transport == "memory"
        least = 0 if env.get("DTCOMM_SINGLE_COPY") == "on" else LEAST_PULLED
        pulls = not self.single_copy and may_be_pulled(spec) and tensor_bytes(spec) >= least
        direct = shared and self._link is None and is_direct(spec, LEAST_DIRECT)
        piece = piece_bytes(spec, self.ranks) * (self._slot_bytes // SLOT_BYTES)
        if not shared and env.get("DTCOMM_PIECE_KIB") == "0":
            piece = message_piece(spec, self.ranks)
        return native_plan(
            spec, schedule, self.rank, piece, self._slot_bytes, _boxes(self.ranks), direct, pulls
        )

    def run(self, plan: Any, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Run to the end; returns the bytes sent."""
        try:
            if hooks is not None:
                return self.native.run_all(plan, [part.pointers() for part in buffers], seed, *hooks.native())
            if len(buffers) == 1:
                return self.native.run(plan, *buffers[0].pointers(), seed)
            return self.native.run_all(plan, [part.pointers() for part in buffers], seed)
        except DtcommError as error:
            self.failed(error)
            raise

    def submit(
        self,
        plan: Any,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> Work:
        """Queue behind what runs already."""
        steps = () if hooks is None else hooks.native()
        try:
            native = self.native.submit(plan, [part.pointers() for part in buffers], seed, *steps)
        except DtcommError as error:
            self.failed(error)
            raise
        return NativeWork(native, (buffers, hooks), outputs, self.failed)

    def failed(self, error: DtcommError) -> None:
        """An operation raised: leave a record of it, once."""
        if not self._recorded:
            self._recorded = True
            flight_recorder.failed(error)

    @property
    def failure(self) -> str:
        """Why calls raise; empty where they do not."""
        return self.native.failure

    def flight_entries(self) -> list[FlightEntry]:
        """The last operations, oldest first."""
        return [
            FlightEntry(
                number, text, json.loads(about), STAGES[stage], issued, started, finished, peer, peers
            )
            for number, text, about, stage, issued, started, finished, peer, peers in self.native.flight_records()
        ]

    def peer_snapshots(self) -> list[PeerSnapshot]:
        """What is to be seen of every rank, in rank order."""
        return [PeerSnapshot(*seen) for seen in self.native.peer_snapshots()]

    def set_timeout(self, seconds: float) -> None:
        """How long the calls from now on wait for the other ranks."""
        self.native.set_timeout(seconds)

    def close(self) -> None:
        """Let go of all shared memory; peers that still wait for this rank are told."""
        self.native.close()

    def info(self) -> dict[str, Any]:
        """For reports."""
        return {
            "runtime": self.name,
            "transport": self.transport,
            "kernels": _C.engine_kernels(),
            "round_trip_ns": self.native.round_trip_ns,
            "staging": "streaming" if self.native.stream_staging else "ordinary",
            "single_copy": self.single_copy or "process_vm_readv",
            "pulled_bytes": self.native.single_copy_bytes,
            "operations": self.native.operations,
            "wire_bytes": self.native.wire_bytes,
        }


def empty_shared(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a region that peers can map; the region goes with the tensor's storage."""
    numel = shape.numel()
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    region = _C.SharedTensorMemory(numel * dtype.itemsize)
    return torch.frombuffer(region, dtype=dtype, count=numel).view(shape)


def native_plan(
    spec: OpSpec,
    schedule: Schedule,
    rank: int,
    piece_bytes: int,
    slot_bytes: int,
    max_boxes: int = 2**16,
    direct: bool | None = None,
    pulls: bool = False,
) -> _C.NativePlan:
    """The schedule, lowered for ``rank`` and laid over the spec's parts; ``direct`` None: wherever it can be."""
    program = lower(schedule, rank)
    native = _C.NativeProgram(
        rank, schedule.ranks, program.chunks, list(program.payload_counts), program.flat()
    )
    return _C.NativePlan(
        program=native,
        geometry=GEOMETRY[spec.collective],
        op=OPS[spec.op],
        average=spec.op == "avg",
        segments=[
            (part.numel, ELEMENT_TYPES[part.dtype], part.codec.native(), part.at(1).native())
            for part in spec.parts
        ],
        piece_bytes=piece_bytes,
        slot_bytes=slot_bytes,
        zero_copy=is_direct(spec) if direct is None else direct,
        text=str(spec),
        max_boxes=max_boxes,
        splits=list(spec.splits),
        checksum=spec.checksum,
        call_info=json.dumps(spec.details()),
        single_copy=pulls,
    )


def _rate(link: Link | None) -> tuple[float, float, float]:
    """Microseconds of latency, nanoseconds a byte, and those of CPU time, as the engine takes them."""
    if link is None:
        return 0.0, 0.0, 0.0
    return link.latency_s * 1e6, link.ns_per_byte, link.cpu_ns_per_byte()


def _slot_bytes(link: Link) -> int:
    """Pieces so large that those under way at once fill the link for as long as an answer takes."""
    slot = SLOT_BYTES
    while slot < LARGEST_SLOT_BYTES and slot * link.ns_per_byte < 2 * link.latency_ns:
        slot *= 2
    return slot


def _boxes(ranks: int) -> int:
    return max(LEAST_BOXES, 2 * ranks + 2)


def _has_huge_pages() -> bool:
    """Whether the kernel gives torch's large tensors huge pages."""
    try:
        chosen = HUGE_PAGES.read_text()
    except OSError:
        return False
    return "[always]" in chosen or (
        "[madvise]" in chosen and os.environ.get("THP_MEM_ALLOC_ENABLE", "0") == "1"
    )
