"""What distinguishes one collective from another in a bandwidth benchmark: byte counts and formulas."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}
ALIASES = {"int": "int32", "fp16": "half", "float16": "half", "fp32": "float", "float32": "float"}
ALIASES |= {"fp64": "double", "float64": "double", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """``shards``: input or output holds a shard of every rank, and ``count`` is one of them.

    ``reduces``: there is an operator; ``rooted``: there is a root; ``alike``: all ranks end with the same.
    ``whole_in_place``: the API works on one tensor, so that out of place takes a copy. ``separate``: it needs two,
    so that there is no in place. ``bus`` (n) is how many times the bytes of the whole operation cross the slowest
    link at least, which turns algbw into busbw.
    """

    name: str
    shards: bool = False
    reduces: bool = False
    rooted: bool = False
    round_trip: bool = False
    alike: bool = False
    whole_in_place: bool = False
    separate: bool = False

    def count(self, size: int, dtype: torch.dtype, ranks: int) -> int:
        """Elements for about ``size`` bytes; shards are cut to 16 bytes, as in nccl-tests."""
        count = size // dtype.itemsize
        if not self.shards:
            return count
        return count // ranks // (16 // dtype.itemsize) * (16 // dtype.itemsize)

    def size(self, count: int, dtype: torch.dtype, ranks: int) -> int:
        """Bytes of the whole operation: of all shards where there are any."""
        return count * dtype.itemsize * (ranks if self.shards else 1)

    def bus(self, ranks: int) -> float:
        if self.round_trip or self.shards:
            return (2 if self.round_trip else 1) * (ranks - 1) / ranks
        return 1.0


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective(name="all_reduce", reduces=True, round_trip=True, alike=True, whole_in_place=True),
        Collective(name="reduce_scatter", reduces=True, shards=True),
        Collective(name="all_gather", shards=True, alike=True),
        Collective(name="broadcast", rooted=True, alike=True, whole_in_place=True),
        Collective(name="reduce", reduces=True, rooted=True, whole_in_place=True),
        Collective(name="gather", shards=True, rooted=True),
        Collective(name="scatter", shards=True, rooted=True),
        Collective(name="all_to_all", shards=True, separate=True),
        Collective(name="sendrecv", separate=True),  # every rank to the next
    )
}


def bandwidths(collective: Collective, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """(algbw, busbw) in GB/s, GB = 1e9 bytes; ``size`` counts uncompressed bytes, whatever the codec sends."""
    algorithm = size / seconds / 1e9 if seconds > 0 else 0.0
    return algorithm, algorithm * collective.bus(ranks)
