"""Test inputs whose reduction is exact in every order of summation, and the expected results of collectives.

All values are integers small enough that any partial sum over the ranks fits into the dtype's significand. For
``avg`` they are multiples of the world size, so that the division is exact too. Every correct implementation therefore
returns the same bits, and a lost, doubled or misplaced contribution is detected. Values repeat with a prime period, so
that a block written to a wrong offset does not match by accident while a check costs little more than a copy.

``count`` has the meaning of nccl-tests. For all_reduce, broadcast, reduce and sendrecv (every rank sends to the next)
it is the number of elements of the whole tensor. For the others it is the number of elements of one shard; the input
of reduce_scatter and scatter, the output of all_gather and gather, and both tensors of all_to_all have
``count * world_size`` elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from dtcomm.schedule import ir

PERIOD = 1_048_573
SHARDS_IN = ("reduce_scatter", "scatter", "all_to_all")
COLLECTIVES = (*ir.COLLECTIVES, "sendrecv")
OPS = ("sum", "avg", "min", "max")

# (dtype, op, rank, world_size, seed, numel) -> the first min(numel, PERIOD) values of a rank, as float64 or int64 so
# that they can be summed.
ValueSource = Callable[[torch.dtype, str, int, int, int, int], torch.Tensor]


def integers(dtype: torch.dtype, op: str, rank: int, world_size: int, seed: int, numel: int) -> torch.Tensor:
    """Return integers whose sums are exact in ``dtype`` in every order."""
    step, bound, active = integer_range(dtype, op, world_size)
    low = -bound if dtype.is_signed else 0
    values = torch.randint(low, bound + 1, (min(numel, PERIOD),), generator=_generator(rank, seed)) * step
    if rank >= active:
        values.zero_()
    return values.double() if dtype.is_floating_point else values


def normal(dtype: torch.dtype, op: str, rank: int, world_size: int, seed: int, numel: int) -> torch.Tensor:
    """Return normally distributed values rounded to ``dtype``, for lossy codecs."""
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
    values: ValueSource = integers,
) -> torch.Tensor:
    """Return the 1-D input of ``rank``.

    It has ``count * world_size`` elements if the rank holds a shard for each rank, otherwise ``count``.
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
    values: ValueSource = integers,
) -> torch.Tensor:
    """Return the expected output of ``rank`` if each rank passes its `inputs` with the same arguments.

    With `integers` the result must match bit for bit. With other values it is the reduction in float64, rounded once.
    The tensor is empty for a rank that has no output.
    """
    _check(collective, op)
    if collective in ("reduce", "gather") and rank != root:
        return torch.empty(0, dtype=dtype)
    offset = rank * count if collective in SHARDS_IN else 0
    sources = list(range(world_size))
    if collective in ("broadcast", "scatter", "sendrecv"):
        sources = [root if collective != "sendrecv" else (rank - 1) % world_size]
    patterns = [values(dtype, op, source, world_size, seed, offset + count) for source in sources]
    if collective in ("all_reduce", "reduce", "reduce_scatter"):
        return _repeat(_combine(patterns, op).to(dtype), offset, count)
    return torch.cat([_repeat(pattern.to(dtype), offset, count) for pattern in patterns])


def count_mismatches(result: torch.Tensor, reference: torch.Tensor) -> int:
    """Return how many elements of ``result`` differ from ``reference``; a NaN always counts."""
    return int((result.reshape(-1) != reference.reshape(-1)).sum())


def integer_range(dtype: torch.dtype, op: str, world_size: int) -> tuple[int, int, int]:
    """Return ``(step, bound, active)``: values are ``step * k`` with |k| <= ``bound``.

    Ranks from ``active`` on contribute zeros, because more ranks than the dtype has integers cannot all contribute to
    an exact sum.
    """
    largest_exact = torch.iinfo(dtype).max if not dtype.is_floating_point else int(2 / torch.finfo(dtype).eps)
    step = world_size if op == "avg" else 1
    bound = max(1, largest_exact // (step * world_size))
    return step, bound, max(1, min(world_size, largest_exact // (step * bound)))


def _check(collective: str, op: str) -> None:
    if collective not in COLLECTIVES:
        raise ValueError(f"collective: {collective!r}; valid: {', '.join(COLLECTIVES)}")
    if op not in OPS:
        raise ValueError(f"op: {op!r}; valid: {', '.join(OPS)}")


@functools.lru_cache(maxsize=16)  # all ranks need every rank's values, several times
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
    rolled = pattern.roll(-start)  # patterns shorter than a period never reach this line
    return rolled.repeat(-(-numel // PERIOD))[:numel].clone()
