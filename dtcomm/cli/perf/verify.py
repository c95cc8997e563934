"""Are the results right? Bit for bit where nothing is lost; inside the codec's error bound where something is."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dtcomm import algorithms, planner
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.options import Variant
from dtcomm.codecs import codec
from dtcomm.measure import exact_inputs

_BLOCK = 1 << 20  # elements looked at together, to keep the float64 copies small


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``wrong`` elements on this rank; the errors, of a lossy codec, are relative to the result's own size."""

    wrong: int
    max_error: float | None = None
    mean_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One collective of ``count`` elements (as in ``dtcomm.measure.exact_inputs``) as this rank takes part in it."""

    collective: str
    count: int
    dtype: torch.dtype
    op: str
    root: int
    rank: int
    ranks: int

    def inputs(self, seed: int, values: exact_inputs.ValueSource) -> torch.Tensor:
        return exact_inputs.inputs(
            self.collective,
            self.count,
            self.dtype,
            op=self.arithmetic,
            rank=self.rank,
            world_size=self.ranks,
            seed=seed,
            values=values,
        )

    def expected(self, seed: int, values: exact_inputs.ValueSource) -> torch.Tensor:
        return exact_inputs.expected(
            self.collective,
            self.count,
            self.dtype,
            op=self.arithmetic,
            rank=self.rank,
            world_size=self.ranks,
            root=self.root,
            seed=seed,
            values=values,
        )

    @property
    def arithmetic(self) -> str:
        return self.op if COLLECTIVES[self.collective].reduces else "sum"

    @property
    def span(self) -> int:
        """Elements of a buffer in which the call can be made in place."""
        return self.count * (self.ranks if COLLECTIVES[self.collective].shards else 1)

    def arranged(
        self, buffer: torch.Tensor, source: torch.Tensor, in_place: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, input) of a call: both within ``buffer``, which has ``span`` elements, or from ``source``."""
        mine = slice(self.rank * self.count, (self.rank + 1) * self.count)
        if self.collective in ("reduce_scatter", "scatter"):
            # Out of place, the other shards of the buffer stay unused.
            return buffer[mine], buffer if in_place else source
        if not in_place:
            return buffer, source
        return buffer, buffer[mine] if self.collective in ("all_gather", "gather") else buffer


def values_for(variant: Variant, dtype: torch.dtype) -> exact_inputs.ValueSource:
    """What to feed: numbers whose sum is exact, or for a lossy codec numbers like gradients."""
    return exact_inputs.integers if codec(variant.codec).lossless(dtype) else exact_inputs.normal


def judge(
    result: torch.Tensor, case: Case, variant: Variant, seed: int, same: Callable[[torch.Tensor], bool]
) -> Verdict:
    """Compare with what the ranks' inputs of ``seed`` must give, where ``result`` is.

    ``same`` says whether all ranks have the same bits as this one; it is asked on all ranks, or on none.
    """
    values = values_for(variant, case.dtype)
    want = case.expected(seed, values).to(result.device)
    if want.numel() == 0:  # also of a rank that has no output
        lossless = values is exact_inputs.integers
        return Verdict(wrong=0) if lossless else Verdict(wrong=0, max_error=0.0, mean_error=0.0)
    if values is exact_inputs.integers:
        return Verdict(wrong=exact_inputs.count_mismatches(result, want))
    bound, mean_bound = bounds(case, variant, seed)
    wrong, largest, total = _errors(result.reshape(-1), want, bound)
    mean = total / want.numel()
    alike = not COLLECTIVES[case.collective].alike or same(result)
    # A broken reduction may keep every element inside a coarse codec's bound; its mean error gives it away.
    if not mean <= mean_bound or not alike:
        wrong = want.numel()
    scale, mean_scale = want.abs().amax().item(), want.abs().mean(dtype=torch.float64).item()
    return Verdict(
        wrong=wrong,
        max_error=largest / scale if scale else largest,
        mean_error=mean / mean_scale if mean_scale else mean,
    )


def bounds(case: Case, variant: Variant, seed: int) -> tuple[float, float]:
    """The largest and the mean absolute error that the codec explains.

    A contribution is encoded at most d times on its way (read off the schedule), each time as part of a sum no
    larger than that of all contributions. What one encoding does is measured on this rank's own values; a factor
    of 2 covers sums whose exponent is one higher than any value's.
    """
    encodings = _encodings(case, variant)
    peak, worst, mean = _one_encoding(case.dtype, case.rank, seed, variant.codec)
    peak *= 1.25  # the other ranks' largest value is not far from this one's
    contributions = case.ranks if COLLECTIVES[case.collective].reduces else 1
    if case.op in ("min", "max"):
        contributions = 1
    divisor = case.ranks if case.op == "avg" else 1
    rounding = torch.finfo(case.dtype).eps * contributions * peak / divisor
    bound = 2 * encodings * worst * contributions * 1.25 / divisor + rounding
    return bound, 1.5 * encodings * mean * contributions / divisor + rounding


def _encodings(case: Case, variant: Variant) -> int:
    if variant.schedule is not None:
        return max(1, variant.schedule.requantizations())
    if case.collective not in algorithms.collectives():
        return 1
    shards = COLLECTIVES[case.collective].shards
    name = planner.select(
        case.collective,
        case.count * (case.ranks if shards else 1),
        case.dtype,
        codec(variant.codec),
        case.ranks,
        algorithm=variant.algorithm,
    )
    return max(1, algorithms.build(name, case.collective, case.ranks, case.root).requantizations())


@functools.lru_cache(maxsize=64)  # the same for every size, in place and out of place
def _one_encoding(dtype: torch.dtype, rank: int, seed: int, spec: str) -> tuple[float, float, float]:
    """Of a rank's values: the largest, and the largest and mean absolute error of encoding and decoding them once."""
    from dtcomm.kernels import ops

    values = exact_inputs.normal(dtype, "sum", rank, rank + 1, seed, exact_inputs.PERIOD).float()
    error = (ops.decode(spec, ops.encode(spec, values), values.numel()) - values).abs()
    return float(values.abs().amax()), float(error.amax()), float(error.mean())


def _errors(result: torch.Tensor, want: torch.Tensor, bound: float) -> tuple[int, float, float]:
    """Elements further off than ``bound`` (NaN is), the largest absolute error and the sum of all."""
    wrong, largest, total = 0, 0.0, 0.0
    for start in range(0, want.numel(), _BLOCK):
        part = slice(start, start + _BLOCK)
        error = (result[part].double() - want[part].double()).abs()
        wrong += int((~(error <= bound)).sum())
        largest = max(largest, float(error.amax()))
        total += float(error.sum())
    return wrong, largest, total


def digest(result: torch.Tensor) -> int:
    """A checksum of its bytes."""
    return zlib.crc32(result.contiguous().view(torch.uint8).cpu().numpy().data)


def equal_on_all_ranks(result: torch.Tensor) -> bool:
    """Whether all ranks, which call it together, have the same bits."""
    seen: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(seen, digest(result))
    return len(set(seen)) == 1


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdicts of all checks on all ranks as one."""
    largest = [verdict.max_error for verdict in verdicts if verdict.max_error is not None]
    means = [verdict.mean_error for verdict in verdicts if verdict.mean_error is not None]
    return Verdict(
        wrong=sum(verdict.wrong for verdict in verdicts),
        max_error=max(largest) if largest else None,
        mean_error=max(means) if means else None,
    )
