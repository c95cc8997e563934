"""Inputs whose reduction is exact in every order, and the results they must give.

All values are integers small enough that any partial sum over the ranks fits into the dtype's significand,
and for ``avg`` so chosen that the division is exact too. So every correct implementation gives the same bits,
and any lost, doubled or misplaced contribution shows. Values come from a seeded pattern whose period is prime:
a block that lands at a wrong place does not match by accident, and a check costs little more than a copy.

``count`` is nccl-tests': the elements of the whole tensor for all_reduce and broadcast, of one rank's shard
for reduce_scatter (its input has ``count * world_size``) and all_gather (its output has).
"""

from __future__ import annotations

import torch

PERIOD = 1_048_573
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
OPS = ("sum", "avg", "min", "max")


def inputs(
    collective: str,
    count: int,
    dtype: torch.dtype = torch.float32,
    *,
    op: str = "sum",
    rank: int,
    world_size: int,
    seed: int = 0,
) -> torch.Tensor:
    """What ``rank`` puts in: 1-D, of ``count * world_size`` elements for reduce_scatter, else ``count``."""
    _check(collective, op)
    numel = count * world_size if collective == "reduce_scatter" else count
    return _repeat(_pattern(dtype, op, rank, world_size, seed, numel), 0, numel).to(dtype)


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
) -> torch.Tensor:
    """What ``rank`` must end with, bit for bit, if each rank put in its ``inputs`` of the same arguments."""
    _check(collective, op)
    if collective == "broadcast":
        return inputs(collective, count, dtype, op=op, rank=root, world_size=world_size, seed=seed)
    offset = rank * count if collective == "reduce_scatter" else 0
    patterns = [_pattern(dtype, op, r, world_size, seed, offset + count) for r in range(world_size)]
    if collective == "all_gather":
        return torch.cat([_repeat(pattern, 0, count) for pattern in patterns]).to(dtype)
    return _repeat(_combine(patterns, op), offset, count).to(dtype)


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


def _pattern(dtype: torch.dtype, op: str, rank: int, world_size: int, seed: int, numel: int) -> torch.Tensor:
    """A rank's first ``numel`` values, or one period, in float64 or int64, in which their sums are exact."""
    step, bound, active = largest(dtype, op, world_size)
    low = -bound if dtype.is_signed else 0
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    values = torch.randint(low, bound + 1, (min(numel, PERIOD),), generator=generator) * step
    if rank >= active:
        values.zero_()
    return values.double() if dtype.is_floating_point else values


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
    if start + numel <= PERIOD:
        return pattern[start : start + numel]
    turned = pattern.roll(-start)
    return turned.repeat(-(-numel // PERIOD))[:numel]
