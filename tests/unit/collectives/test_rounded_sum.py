"""`exact:rounded=true`: the exact sum, rounded once, whatever the data; the same digits from every kernel."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

import dtcomm
from dtcomm import _C
from dtcomm.codecs import codec
from dtcomm.kernels import dispatch, local_tasks
from dtcomm.kernels.local_tasks import LocalTask, SumRange

SPEC = "exact:rounded=true"
KINDS = ("plain", "wide", "cancelling", "subnormal", "outliers")


def adversarial(kind: str, ranks: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Return finite contributions of a kind for which sums in floating point are wrong, or digits are many."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for rank in range(ranks):
        x = torch.randn(numel, generator=generator)
        if kind == "wide":
            x *= torch.exp(torch.randn(numel, generator=generator) * 20)
        elif kind == "subnormal":
            x *= 2.0**-140
        elif kind == "outliers":
            x = torch.where(torch.rand(numel, generator=generator) < 0.005, x * 64, x)
        elif kind == "cancelling" and rank % 2:  # the large parts of two ranks cancel each other
            x = -tensors[-1].float() + x * 2.0**-30
        elif kind == "cancelling":
            x *= 2.0**60
        x = x.to(dtype)
        x[~x.isfinite()] = 1
        tensors.append(x)
    return tensors


def nearest(value: Fraction, like: torch.Tensor) -> bool:
    """Return whether the scalar ``like`` is the number of its type nearest to ``value``, even for a tie."""
    got = float(like)
    if math.isinf(got):
        largest = Fraction(float(torch.finfo(like.dtype).max))
        above = largest + Fraction(2) ** (largest.numerator.bit_length() - 1 - mantissa_bits(like.dtype)) / 2
        return abs(value) >= above and (value > 0) == (got > 0)
    error = abs(Fraction(got) - value)
    for direction in (-math.inf, math.inf):
        other = float(torch.nextafter(like, torch.tensor(direction, dtype=like.dtype)))
        if math.isinf(other):
            continue
        difference = abs(Fraction(other) - value)
        odd = int(like.view(torch.int32 if like.dtype == torch.float32 else torch.int16)) & 1
        if difference < error or (difference == error and odd):
            return False
    return True


def mantissa_bits(dtype: torch.dtype) -> int:
    return round(-math.log2(torch.finfo(dtype).eps))


def sum_of(
    inputs: list[torch.Tensor], divisor: int = 1, kernel: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of all ranks, made here by the tasks of each, and the digits of the first rank."""

    def run(task: LocalTask) -> None:
        if kernel == dispatch.REFERENCE:
            task.reference()
        elif kernel:
            assert task.native is not None
            task.native.run(kernel)
        else:
            task()

    out, digits = local_tasks.sum_rounded(torch.stack(inputs), divisor, run)
    return out, digits[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_sums_are_the_exact_sums_rounded_once(ranks: int, kind: str, dtype: torch.dtype) -> None:
    inputs = adversarial(kind, ranks, 300, dtype, seed=ranks)
    columns = [
        [Fraction(value) for value in column]
        for column in zip(*(x.double().tolist() for x in inputs), strict=True)
    ]
    for divisor in (1, ranks):
        out, _ = sum_of(inputs, divisor)
        wrong = [
            i for i, column in enumerate(columns) if not nearest(sum(column, Fraction(0)) / divisor, out[i])
        ]
        assert not wrong


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_gives_the_digits_and_sums_of_the_reference(dtype: torch.dtype, kind: str) -> None:
    for numel, ranks in ((1, 2), (333, 5), (1000, 33)):
        inputs = adversarial(kind, ranks, numel, dtype, seed=numel)
        expected, digits = sum_of(inputs, ranks, dispatch.REFERENCE)
        for kernel in [name for name, supported in _C.kernels() if supported]:
            out, made = sum_of(inputs, ranks, kernel)
            assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8)), (kernel, numel)
            assert torch.equal(made, digits), (kernel, numel)


def test_order_and_place_of_contributions_do_not_matter() -> None:
    inputs = adversarial("wide", 8, 4000, torch.float32)
    total, _ = sum_of(inputs)
    again, _ = sum_of(inputs[::-1])
    assert torch.equal(total, again)
    cut, _ = sum_of([x[5:].contiguous() for x in inputs])
    assert torch.equal(cut, total[5:])


def test_a_kernel_that_cannot_sum_device_tensors_is_refused() -> None:
    x, ranges = torch.empty(64, device="meta"), torch.empty(2, 2, dtype=torch.uint8, device="meta")
    with (
        dispatch.use("generic"),
        pytest.raises(ValueError, match="tensor: is on meta, where the forced kernel 'generic' cannot run"),
    ):
        local_tasks.measure_digits(x, SumRange(2, *ranges), False)
    if not dispatch.installed():
        with pytest.raises(RuntimeError, match=f"tensor: is on meta, where codec '{SPEC}' needs .* _cuda"):
            local_tasks.measure_digits(x, SumRange(2, *ranges), False)


def test_what_is_sent_alone_is_uncompressed_and_options_are_checked() -> None:
    x = torch.randn(100)
    assert torch.equal(dtcomm.decode(SPEC, dtcomm.encode(SPEC, x), 100), x)
    assert str(codec(SPEC)) == SPEC and codec(SPEC).lossless(torch.float32)
    assert dtcomm.encode(SPEC, x).numel() == 400
    for spec in ("exact:bits=16,rounded=true", "exact:rounded=true,bits=16", "exact:rounded=false"):
        with pytest.raises(
            ValueError, match=f"exact: rounded=true .* got '{spec}'; valid: {SPEC}, or exact with"
        ):
            codec(spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [4096, 2**16])
def test_messages_of_a_sum_have_the_sizes_that_numbers_of_similar_size_take(
    numel: int, dtype: torch.dtype
) -> None:
    _, digits = sum_of(adversarial("plain", 4, numel, dtype))
    for collective in ("reduce", "reduce_scatter", "all_reduce"):
        ranges, values = (count for count, *_ in codec(SPEC).sum_messages(numel, collective, dtype))
        sent = digits.nbytes
        if collective == "all_reduce" and numel == 2**16:  # each rank rounds a part, and sends it
            sent = (sent + numel * dtype.itemsize) // 2
        assert ranges == numel // 16
        assert values == pytest.approx(sent, rel=0.06), (collective, sent / numel)
