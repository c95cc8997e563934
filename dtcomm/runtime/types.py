"""Types shared by all runtimes: what an operation is, the tensors it works on, and the interface of a runtime.

``dtcomm.collectives`` describes an operation as an :class:`OpSpec`, asks the communicator's :class:`Runtime` to
``prepare`` a :class:`Plan` for it once, and then runs the plan on :class:`Buffers` as often as it is called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.runtime.flight_recorder import FlightEntry, PeerSnapshot
from dtcomm.schedule import Schedule
from dtcomm.schedule.ir import REDUCING, ROOTED
from dtcomm.work import CompositeWork, Work

# How chunks lie in the caller's tensors (csrc/core/chunk_layout.h, Geometry).
GEOMETRY = {
    "all_reduce": 0,
    "broadcast": 0,
    "reduce": 0,
    "reduce_scatter": 1,
    "scatter": 1,
    "all_gather": 2,
    "gather": 2,
    "all_to_all": 3,
}

# A two-shot all_reduce in which the owner of a chunk also encodes its own contribution to it, so that every element is
# encoded exactly twice. Only fused kernels do this, and no schedule expresses it.
TWO_SHOT_SYMMETRIC = "two_shot_symmetric"

OPS = {"sum": 0, "avg": 0, "min": 1, "max": 2}


ElementRange = tuple[int, int, int, int]
"""Consecutive elements of one tensor of a message: (tensor, offset in the input, offset in the output, elements)."""


class TensorSpec(NamedTuple):
    """One tensor of a message: its size, type and codec.

    ``numel`` counts the elements of the whole tensor, or of one shard for gather, scatter and all_to_all (the largest
    shard where they differ). ``between`` is the codec between hosts where that differs from ``codec``.
    """

    numel: int
    dtype: torch.dtype
    codec: Codec
    between: Codec | None = None

    def at(self, level: int) -> Codec:
        """The codec at a level of the hierarchy: 0 is inside a host, 1 between hosts."""
        return self.codec if level == 0 or self.between is None else self.between

    @property
    def granularity(self) -> int:
        """Elements at whose multiples the payloads of both codecs may be cut."""
        return math.lcm(self.codec.granularity, self.at(1).granularity)

    @property
    def spec(self) -> str:
        """The codec as a spec string, such as ``int8``, or ``none/int4`` with another codec between hosts."""
        return str(self.codec) if self.between is None else f"{self.codec}/{self.between}"

    @property
    def identity(self) -> str:
        """The codec as ranks compare it: ``spec``, with a checksum of what no spec says."""
        inside = self.codec.identity
        return inside if self.between is None else f"{inside}/{self.between.identity}"


class OpSpec(NamedTuple):
    """An operation without its tensors: everything that ranks must agree on.

    A plan and its fingerprint are made from it. ``parts`` are the tensors of the message. ``splits`` are the elements
    that each rank sends to each other rank in an all_to_all of unequal shards, at index sender * ranks + receiver;
    empty if all shards are equal. With ``checksum`` every payload is sent with its CRC32C. ``purpose`` names the stage
    of a multi-stage operation that this one is. ``alternative`` names another algorithm with the same results, and its
    schedule, if the caller left the algorithm to dtcomm: a runtime may use either.
    """

    collective: str
    op: str
    parts: tuple[TensorSpec, ...]
    algorithm: str
    root: int = 0
    splits: tuple[int, ...] = ()
    checksum: bool = False
    purpose: str = ""
    alternative: tuple[str, Schedule] | None = None

    @property
    def in_python(self) -> bool:
        """Whether a codec of a part is written in Python."""
        return any(part.codec.in_python or part.at(1).in_python for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the input tensors of all parts."""
        return sum(part.numel * part.dtype.itemsize for part in self.parts)

    def lay_out(self, chunks: int, ranks: int, elements: int = 0) -> list[list[list[ElementRange]]]:
        """Where the chunks of a schedule lie in the tensors, as [chunk][piece][range].

        A piece takes whole granules of a chunk until it has at least ``elements``; 0: a chunk is one piece.
        """
        segments = [(part.numel, part.granularity) for part in self.parts]
        return _C.chunk_layout(GEOMETRY[self.collective], segments, chunks, ranks, self.splits, elements)

    def chunk_payload_bytes(self, chunks: int, ranks: int) -> list[int]:
        """Bytes of the payload of each whole chunk, encoded for ranks of the same host."""
        return [
            sum(
                self.parts[part].codec.wire_bytes(numel, self.parts[part].dtype)
                for piece in chunk
                for part, _, _, numel in piece
            )
            for chunk in self.lay_out(chunks, ranks)
        ]

    @property
    def _operation(self) -> str:
        return "send" if self.algorithm == "send" else self.collective

    @property
    def _dtypes(self) -> str:
        return "/".join(dict.fromkeys(str(part.dtype).removeprefix("torch.") for part in self.parts))

    @property
    def _codecs(self) -> str:
        return " ".join(dict.fromkeys(part.spec for part in self.parts))

    def details(self) -> dict[str, Any]:
        """The operation as JSON values, for flight records; sizes are those of a shard for gathers and scatters."""
        details: dict[str, Any] = {
            "collective": self._operation,
            "numel": sum(part.numel for part in self.parts),
            "bytes": self.nbytes,
            "dtype": self._dtypes,
            "codec": self._codecs,
            "algorithm": self.algorithm,
        }
        if self.collective in REDUCING:
            details["op"] = self.op
        if self.collective in ROOTED:
            details["root"] = self.root
        return details

    def __str__(self) -> str:
        """The text in error messages: ``all_reduce(sum, 1024 float32, codec int8, two_shot)``."""
        numel = sum(part.numel for part in self.parts)
        size = f"{numel} {self._dtypes}" + (f" in {len(self.parts)} tensors" if len(self.parts) != 1 else "")
        identities = " ".join(dict.fromkeys(part.identity for part in self.parts))
        details = [size, f"codec {identities}", self.algorithm]
        if self.purpose:
            details.insert(1, self.purpose)
        if self._operation in REDUCING:
            details.insert(0, self.op)
        if self.splits:
            details.insert(1, "the most of unequal splits")
        if self._operation in ROOTED:
            details.append(f"root {self.root}")
        if self.checksum:
            details.append("checksum")
        return f"{self._operation}({', '.join(details)})"


class Buffers(NamedTuple):
    """The tensors of one part of a message; None for a tensor that this rank does not have."""

    input: torch.Tensor | None
    output: torch.Tensor | None
    residual: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        for tensor in (self.input, self.output):
            if tensor is not None:
                return tensor.device
        return torch.device("cpu")

    def pointers(self) -> tuple[int, int, int]:
        """Addresses of input, output and residual; 0 for a tensor that is None."""
        return (
            0 if self.input is None else self.input.data_ptr(),
            0 if self.output is None else self.output.data_ptr(),
            0 if self.residual is None else self.residual.data_ptr(),
        )


class OpHooks(NamedTuple):
    """Rank-local tasks that run with an operation.

    ``before`` runs when the operation starts, after all operations queued before it; ``after`` runs when it ends.
    ``agreed`` is 0 or a number that ranks compare as they compare the operation itself.
    """

    before: Sequence[LocalTask] = ()
    after: Sequence[LocalTask] = ()
    agreed: int = 0

    def tensors(self) -> list[tuple[torch.Tensor | None, ...]]:
        """The tensors that each task uses."""
        return [task.tensors for task in (*self.before, *self.after)]

    def native(self) -> tuple[list[_C.NativeTask], list[_C.NativeTask], int]:
        """The hooks as the native engine takes them."""
        before, after = (
            [task.native for task in tasks if task.native] for tasks in (self.before, self.after)
        )
        return before, after, self.agreed


NO_HOOKS = OpHooks()


class Plan(Protocol):
    """An operation that a runtime has prepared: calling it needs only the tensors.

    The arguments are positional, so that a plan may be a pair of functions (``stream_runtime.BoundPlan``).
    """

    def run(self, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None, /) -> int:
        """Run to the end; returns the bytes that this rank sent."""

    def submit(
        self,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None,
        /,
    ) -> Work:
        """Queue the operation behind earlier ones; returns its handle, whose future has ``outputs`` as its value."""


class PreparedPlan(Plan, Protocol):
    """A plan of one operation, as a runtime makes it."""

    @property
    def table_bytes(self) -> int:
        """The memory that the plan itself takes, for the bound of the cache."""


class Runtime(Protocol):
    """The executor of one communicator's operations."""

    name: str

    def prepare(self, spec: OpSpec, schedule: Schedule) -> PreparedPlan:
        """A plan for calls of this operation, to be kept and reused."""

    def set_timeout(self, seconds: float) -> None:
        """Set how long later calls wait for the other ranks."""

    def close(self) -> None:
        """Release everything."""

    def info(self) -> dict[str, Any]:
        """The runtime's configuration and counters, for ``dtcomm.info``."""

    @property
    def failure(self) -> str:
        """The error that every later call raises; empty if there is none."""

    def flight_entries(self) -> list[FlightEntry]:
        """The last operations, oldest first."""

    def peer_snapshots(self) -> list[PeerSnapshot]:
        """What shared memory shows of every rank, in rank order; empty without shared memory."""


class SingleRankRuntime:
    """Executes operations of one rank. A codec is not applied: nothing is sent, so nothing is lost."""

    name = "none"
    failure = ""
    table_bytes = 0

    def prepare(self, spec: OpSpec, schedule: Schedule) -> SingleRankRuntime:
        """The runtime itself: copies need no plan."""
        return self

    def run(self, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Copy every input that is not already its output; returns 0, the bytes sent."""
        hooks = hooks or NO_HOOKS
        for task in hooks.before:
            task()
        for part in buffers:
            if part.input is not None and part.output is not None and part.output is not part.input:
                part.output.copy_(part.input.view_as(part.output))
        for task in hooks.after:
            task()
        return 0

    def submit(
        self,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> CompositeWork:
        """As ``run``: there is nothing to wait for."""
        self.run(buffers, seed, hooks)
        return CompositeWork((), outputs)

    def set_timeout(self, seconds: float) -> None:
        """Do nothing: no other rank is waited for."""

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def info(self) -> dict[str, Any]:
        """The runtime's name."""
        return {"runtime": self.name}

    def flight_entries(self) -> list[FlightEntry]:
        """An empty list: a single rank records no operations."""
        return []

    def peer_snapshots(self) -> list[PeerSnapshot]:
        """An empty list: there are no peers."""
        return []
