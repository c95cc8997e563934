"""Checks of results: bit for bit without loss, otherwise within the error bound of the codec."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtcomm import algorithms, planner
from dtcomm.cli.perf.args import Variant
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.codecs import codec
from dtcomm.compress.checkpoint import gather
from dtcomm.measure import exact_inputs

_BLOCK = 1 << 20  # elements compared at a time, to keep the float64 copies small


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Number of wrong elements; for a lossy codec, also errors relative to the magnitude of the result."""

    wrong: int
    max_error: float | None = None
    mean_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One collective of ``count`` elements, counted as in `dtcomm.measure.exact_inputs`, on this rank."""

    collective: str
    count: int
    dtype: torch.dtype
    op: str
    root: int
    rank: int
    ranks: int

    def inputs(self, seed: int, values: exact_inputs.ValueSource) -> torch.Tensor:
        return exact_inputs.inputs(*self._shape, **self._ranks, seed=seed, values=values)

    def expected(self, seed: int, values: exact_inputs.ValueSource) -> torch.Tensor:
        return exact_inputs.expected(*self._shape, **self._ranks, root=self.root, seed=seed, values=values)

    @property
    def _shape(self) -> tuple[str, int, torch.dtype]:
        return self.collective, self.count, self.dtype

    @property
    def _ranks(self) -> dict[str, Any]:
        return {"op": self.reduce_op, "rank": self.rank, "world_size": self.ranks}

    @property
    def reduce_op(self) -> str:
        return self.op if COLLECTIVES[self.collective].reduces else "sum"

    @property
    def buffer_numel(self) -> int:
        """Elements of a buffer in which the call can work in place."""
        return self.count * (self.ranks if COLLECTIVES[self.collective].sharded else 1)

    def output_and_input(
        self, buffer: torch.Tensor, source: torch.Tensor, in_place: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (output, input) of a call: views of ``buffer`` of ``buffer_numel`` elements, or ``source``."""
        own_shard = slice(self.rank * self.count, (self.rank + 1) * self.count)
        if self.collective in ("reduce_scatter", "scatter"):
            # Out of place, the other shards of the buffer are not used.
            return buffer[own_shard], buffer if in_place else source
        if not in_place:
            return buffer, source
        return buffer, buffer[own_shard] if self.collective in ("all_gather", "gather") else buffer


def check_values(variant: Variant, dtype: torch.dtype) -> exact_inputs.ValueSource:
    """Return the inputs of a check: numbers whose sum is exact, or normal values for a lossy codec."""
    return exact_inputs.integers if codec(variant.codec).lossless(dtype) else exact_inputs.normal


def check_result(
    result: torch.Tensor, case: Case, variant: Variant, seed: int, same: Callable[[torch.Tensor], bool]
) -> CheckResult:
    """Compare ``result`` with the expected result of the ranks' inputs of ``seed``, on its device.

    ``same`` returns whether all ranks have the same bits; it is called on all ranks or on none.
    """
    values = check_values(variant, case.dtype)
    expected = case.expected(seed, values).to(result.device)
    if expected.numel() == 0:  # a rank that has no output
        lossless = values is exact_inputs.integers
        return CheckResult(wrong=0) if lossless else CheckResult(wrong=0, max_error=0.0, mean_error=0.0)
    if values is exact_inputs.integers:
        return CheckResult(wrong=exact_inputs.count_mismatches(result, expected))
    bound, mean_bound = error_bounds(case, variant, seed)
    wrong, largest, total = _errors(result.reshape(-1), expected, bound)
    mean = total / expected.numel()
    same_bits = not COLLECTIVES[case.collective].same_on_all_ranks or same(result)
    # A broken reduction may keep every element within a coarse codec's bound; the mean error reveals it.
    if not mean <= mean_bound or not same_bits:
        wrong = expected.numel()
    scale, mean_scale = expected.abs().amax().item(), expected.abs().mean(dtype=torch.float64).item()
    return CheckResult(
        wrong=wrong,
        max_error=largest / scale if scale else largest,
        mean_error=mean / mean_scale if mean_scale else mean,
    )


def error_bounds(case: Case, variant: Variant, seed: int) -> tuple[float, float]:
    """Return bounds of the largest and of the mean absolute error that the codec can cause.

    The schedule gives how often a contribution is encoded on its path, each time as part of a sum no larger than that
    of all contributions. The error of one encoding is measured on this rank's values; a factor of 2 covers sums whose
    exponent is one higher than that of any value.
    """
    encodings = _encodings(case, variant)
    peak, largest_error, mean_error = _one_encoding(case.dtype, case.rank, seed, variant.codec)
    peak *= 1.25  # the other ranks' largest values are close to this rank's
    contributions = case.ranks if COLLECTIVES[case.collective].reduces else 1
    if case.op in ("min", "max"):
        contributions = 1
    divisor = case.ranks if case.op == "avg" else 1
    rounding = torch.finfo(case.dtype).eps * contributions * peak / divisor
    bound = 2 * encodings * largest_error * contributions * 1.25 / divisor + rounding
    return bound, 1.5 * encodings * mean_error * contributions / divisor + rounding


def _encodings(case: Case, variant: Variant) -> int:
    if case.collective not in algorithms.collectives():
        return 1
    shards = COLLECTIVES[case.collective].sharded
    name = planner.select(
        case.collective,
        case.count * (case.ranks if shards else 1),
        case.dtype,
        codec(variant.codec),
        case.ranks,
        algorithm=variant.algorithm,
    )
    return max(1, algorithms.build(name, case.collective, case.ranks, case.root).requantizations())


@functools.lru_cache(maxsize=64)  # does not depend on the size or on in place
def _one_encoding(dtype: torch.dtype, rank: int, seed: int, spec: str) -> tuple[float, float, float]:
    """Return the largest value of a rank and the largest and mean absolute error of encoding its values once."""
    from dtcomm.kernels import ops

    values = exact_inputs.normal(dtype, "sum", rank, rank + 1, seed, exact_inputs.PERIOD).float()
    error = (ops.decode(spec, ops.encode(spec, values), values.numel()) - values).abs()
    return float(values.abs().amax()), float(error.amax()), float(error.mean())


def _errors(result: torch.Tensor, expected: torch.Tensor, bound: float) -> tuple[int, float, float]:
    """Return how many elements differ by more than ``bound`` (or are NaN), the largest and the summed error."""
    wrong, largest, total = 0, 0.0, 0.0
    for start in range(0, expected.numel(), _BLOCK):
        part = slice(start, start + _BLOCK)
        error = (result[part].double() - expected[part].double()).abs()
        wrong += int((~(error <= bound)).sum())
        largest = max(largest, float(error.amax()))
        total += float(error.sum())
    return wrong, largest, total


def checksum(result: torch.Tensor) -> int:
    """Return a checksum of the tensor's bytes."""
    return zlib.crc32(result.contiguous().view(torch.uint8).cpu().numpy().data)


def equal_on_all_ranks(result: torch.Tensor) -> bool:
    """Return whether all ranks have the same bits; all ranks must call it."""
    return len(set(gather(checksum(result)))) == 1


def combine_results(checks: Sequence[CheckResult]) -> CheckResult:
    """Combine the results of several checks and ranks."""
    largest = [check.max_error for check in checks if check.max_error is not None]
    means = [check.mean_error for check in checks if check.mean_error is not None]
    return CheckResult(
        wrong=sum(check.wrong for check in checks),
        max_error=max(largest) if largest else None,
        mean_error=max(means) if means else None,
    )
