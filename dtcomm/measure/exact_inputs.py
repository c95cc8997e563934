"""Inputs whose reduction is exact in every order, and the results they must give.

All values are integers small enough that any partial sum over the ranks fits into the dtype's significand, and
for ``avg`` so chosen that the division is exact too. So every correct implementation gives the same bits, and
any lost, doubled or misplaced contribution shows. Values come from a seeded pattern whose period is prime: a
block that lands at a wrong place does not match by accident, and a check costs little more than a copy.

``count`` is nccl-tests': the elements of the whole tensor for all_reduce, broadcast, reduce and sendrecv (every
rank sends to the next), of one rank's shard for the others: the input of reduce_scatter and scatter, the output of
all_gather and gather, and both of all_to_all have ``count * world_size``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

PERIOD = 1_048_573
SHARDS_IN = ("reduce_scatter", "scatter", "all_to_all")
COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "sendrecv",
)
OPS = ("sum", "avg", "min", "max")

# (dtype, op, rank, world_size, seed, numel) -> the rank's first numel values, or PERIOD of them where that is
# less, as float64 or int64, in which they can be summed.
Values = Callable[[torch.dtype, str, int, int, int, int], torch.Tensor]


def integers(dtype: torch.dtype, op: str, rank: int, world_size: int, seed: int, numel: int) -> torch.Tensor:
    """Integers whose sums are exact in ``dtype`` in every order."""
    step, bound, active = largest(dtype, op, world_size)
    low = -bound if dtype.is_signed else 0
    values = torch.randint(low, bound + 1, (min(numel, PERIOD),), generator=_generator(rank, seed)) * step
    if rank >= active:
        values.zero_()
    return values.double() if dtype.is_floating_point else values


def normal(dtype: torch.dtype, op: str, rank: int, world_size: int, seed: int, numel: int) -> torch.Tensor:
    """Normally distributed values, as gradients are, for what is lossy anyway; rounded to ``dtype``."""
    return _drawn(rank, seed)[:numel].to(dtype).double()


def inputs(
    collective: str,
    count: int,
    dtype: torch.dtype = torch.float32,
    *,
    op: str = "sum",
    rank: int,
    world_size: int,
    seed: int = 0,
    values: Values = integers,
) -> torch.Tensor:
    """What ``rank`` puts in: 1-D, of ``count * world_size`` elements where it has a shard for each rank, else
    ``count``.
    """
    _check(collective, op)
    numel = count * world_size if collective in SHARDS_IN else count
    return _repeat(values(dtype, op, rank, world_size, seed, numel).to(dtype), 0, numel)


def expected(
    collective: str,
    count: int,
    dtype: torch.dtype = torch.float32,
    *,
    op: str = "sum",
    rank: int,
    world_size: int,
    root: int = 0,
    seed: int = 0,
    values: Values = integers,
) -> torch.Tensor:
    """What ``rank`` must end with if each rank put in its ``inputs`` of the same arguments: with ``integers``
    bit for bit, otherwise the reduction in float64, rounded once. Nothing for a rank without an output."""
    _check(collective, op)
    if collective in ("reduce", "gather") and rank != root:
        return torch.empty(0, dtype=dtype)
    offset = rank * count if collective in SHARDS_IN else 0
    givers = list(range(world_size))
    if collective in ("broadcast", "scatter", "sendrecv"):
        givers = [root if collective != "sendrecv" else (rank - 1) % world_size]
    patterns = [values(dtype, op, giver, world_size, seed, offset + count) for giver in givers]
    if collective in ("all_reduce", "reduce", "reduce_scatter"):
        return _repeat(_combine(patterns, op).to(dtype), offset, count)
    return torch.cat([_repeat(pattern.to(dtype), offset, count) for pattern in patterns])


def wrong(result: torch.Tensor, reference: torch.Tensor) -> int:
    """How many elements of ``result`` are not equal to ``reference`` (a NaN never is)."""
    return int((result.reshape(-1) != reference.reshape(-1)).sum())


def largest(dtype: torch.dtype, op: str, world_size: int) -> tuple[int, int, int]:
    """``(step, bound, active)``: values are ``step * k``, |k| <= ``bound``; ranks >= ``active`` give zeros.

    More ranks than the dtype has integers can only be summed exactly if some of them stay out.
    """
    exact = torch.iinfo(dtype).max if not dtype.is_floating_point else int(2 / torch.finfo(dtype).eps)
    step = world_size if op == "avg" else 1
    bound = max(1, exact // (step * world_size))
    return step, bound, max(1, min(world_size, exact // (step * bound)))


def _check(collective: str, op: str) -> None:
    if collective not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, not {collective!r}")
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}")


@functools.lru_cache(maxsize=16)  # every rank's values are asked for by all ranks, and more than once
def _drawn(rank: int, seed: int) -> torch.Tensor:
    return torch.randn(PERIOD, generator=_generator(rank, seed))


def _generator(rank: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + rank)


def _combine(patterns: list[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(patterns)
    if op == "min":
        return stacked.amin(0)
    if op == "max":
        return stacked.amax(0)
    total = stacked.sum(0)
    if op == "avg":
        return torch.div(total, len(patterns), rounding_mode=None if total.is_floating_point() else "trunc")
    return total


def _repeat(pattern: torch.Tensor, offset: int, numel: int) -> torch.Tensor:
    start = offset % PERIOD
    if start + numel <= pattern.numel():
        return pattern[start : start + numel].clone()
    turned = pattern.roll(-start)  # only a whole period is ever repeated
    return turned.repeat(-(-numel // PERIOD))[:numel].clone()
