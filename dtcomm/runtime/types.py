"""What a runtime is asked to do, without the tensors: the key of its plans."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from dtcomm.codecs import Codec
from dtcomm.schedule.ir import REDUCING, ROOTED

# How chunks lie in the caller's tensors (csrc/engine/plan.h, Geometry).
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


class Part(NamedTuple):
    """One tensor of a message; ``numel`` counts all of it, or one shard for gather, scatter and all_to_all (the
    largest shard where they differ). ``between`` is the codec of what crosses hosts, where it is another one.
    """

    numel: int
    dtype: torch.dtype
    codec: Codec
    between: Codec | None = None

    def at(self, level: int) -> Codec:
        """The codec of a level of the hierarchy."""
        return self.codec if level == 0 or self.between is None else self.between

    @property
    def granularity(self) -> int:
        """Where payloads of both codecs may be cut."""
        return math.lcm(self.codec.granularity, self.at(1).granularity)

    @property
    def spec(self) -> str:
        """``int8``, or ``none/int4`` where what crosses hosts has a codec of its own."""
        return str(self.codec) if self.between is None else f"{self.codec}/{self.between}"


class Shape(NamedTuple):
    """Everything that ranks must agree on: it makes the plan and its fingerprint.

    ``splits`` are the elements that each rank sends to each in an all_to_all of unequal shards, sender * ranks +
    receiver; empty where all are equal. With ``checksum`` every payload travels with its CRC32C. ``purpose`` says
    what of a larger operation this is.
    """

    collective: str
    op: str
    parts: tuple[Part, ...]
    algorithm: str
    root: int = 0
    splits: tuple[int, ...] = ()
    checksum: bool = False
    purpose: str = ""

    def __str__(self) -> str:
        """As error messages show it: ``all_reduce(sum, 1024 float32, codec int8, two_shot)``."""
        name = "send" if self.algorithm == "send" else self.collective
        numel = sum(part.numel for part in self.parts)
        dtypes = "/".join(dict.fromkeys(str(part.dtype).removeprefix("torch.") for part in self.parts))
        codecs = " ".join(dict.fromkeys(part.spec for part in self.parts))
        what = f"{numel} {dtypes}" + (f" in {len(self.parts)} tensors" if len(self.parts) != 1 else "")
        details = [what, f"codec {codecs}", self.algorithm]
        if self.purpose:
            details.insert(1, self.purpose)
        if name in REDUCING:
            details.insert(0, self.op)
        if self.splits:
            details.insert(1, "the most of unequal splits")
        if name in ROOTED:
            details.append(f"root {self.root}")
        if self.checksum:
            details.append("checksum")
        return f"{name}({', '.join(details)})"
