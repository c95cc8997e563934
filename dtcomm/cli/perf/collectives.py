"""The measured collectives: their byte counts and bandwidth formulas, as in nccl-tests."""

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
    """Properties of a collective that a bandwidth benchmark needs.

    Attributes:
        sharded: Whether the input or output holds a shard of every rank; ``count`` is then that of one shard.
        round_trip: Whether bytes cross the slowest link twice, as in all_reduce.
        in_place_api: Whether its API works on one tensor, so that an out-of-place call is a copy and the operation.
        needs_two_tensors: Whether it cannot work in place.
    """

    name: str
    sharded: bool = False
    reduces: bool = False
    rooted: bool = False
    round_trip: bool = False
    same_on_all_ranks: bool = False
    in_place_api: bool = False
    needs_two_tensors: bool = False

    def count(self, size: int, dtype: torch.dtype, ranks: int) -> int:
        """Return the elements for about ``size`` bytes; shards are cut to 16 bytes, as in nccl-tests."""
        count = size // dtype.itemsize
        if not self.sharded:
            return count
        return count // ranks // (16 // dtype.itemsize) * (16 // dtype.itemsize)

    def size(self, count: int, dtype: torch.dtype, ranks: int) -> int:
        """Return the bytes of the whole operation, over all shards if there are any."""
        return count * dtype.itemsize * (ranks if self.sharded else 1)

    def bus_factor(self, ranks: int) -> float:
        """Return how many times the bytes of the operation cross the slowest link at least: busbw over algbw."""
        if self.round_trip or self.sharded:
            return (2 if self.round_trip else 1) * (ranks - 1) / ranks
        return 1.0


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective(
            name="all_reduce", reduces=True, round_trip=True, same_on_all_ranks=True, in_place_api=True
        ),
        Collective(name="reduce_scatter", reduces=True, sharded=True),
        Collective(name="all_gather", sharded=True, same_on_all_ranks=True),
        Collective(name="broadcast", rooted=True, same_on_all_ranks=True, in_place_api=True),
        Collective(name="reduce", reduces=True, rooted=True, in_place_api=True),
        Collective(name="gather", sharded=True, rooted=True),
        Collective(name="scatter", sharded=True, rooted=True),
        Collective(name="all_to_all", sharded=True, needs_two_tensors=True),
        Collective(name="sendrecv", needs_two_tensors=True),  # every rank sends to the next
    )
}


def bandwidths(collective: Collective, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return (algbw, busbw) in GB/s, GB = 1e9 bytes; ``size`` counts uncompressed bytes with every codec."""
    algorithm = size / seconds / 1e9 if seconds > 0 else 0.0
    return algorithm, algorithm * collective.bus_factor(ranks)
