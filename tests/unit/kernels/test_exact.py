"""Codec exact: error bounds, room for every rank in a sum, and the same numbers from every kernel."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from dtcomm.codecs import Exact
from dtcomm.codecs import codec as parse
from dtcomm.kernels import available, local_tasks, use
from tests.unit.kernels.inputs import KINDS, floats

FLT_MAX = 3.4028234663852886e38
GRIDS = [Exact(bits=bits, block=block) for bits in (16, 32) for block in (16, 32, 1024)]


def quantize_to_grid(
    codec: Exact,
    ranks: int,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    grid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (exponents, integers) of a contribution; without ``grid``, its own exponents are measured."""
    if grid is None:
        grid = torch.empty(codec.blocks(x.numel()), dtype=torch.uint8)
        local_tasks.measure_exponents(codec, x, residual, grid)()
    codes = torch.empty(x.numel(), dtype=codec.code_type)
    local_tasks.quantize_to_exponents(codec, ranks, x, residual, grid, codes)()
    return grid, codes


def unit_of_each_element(codec: Exact, ranks: int, grid: torch.Tensor, numel: int) -> list[Fraction]:
    digits = codec.digits(ranks)
    return [Fraction(2) ** (int(grid[i // codec.block]) - 126 - digits) for i in range(numel)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 128])
@pytest.mark.parametrize("kind", ["normal", "wide", "blocks_apart", "extremes", "zeros", "ties", "outlier"])
def test_quantization_error_is_within_a_unit(kind: str, ranks: int) -> None:
    """Half a unit; less than one for clamped integers, which are at the top of a block. Zeros stay zeros."""
    for codec in GRIDS:
        x = floats(kind, 700, seed=ranks).nan_to_num(0.0, posinf=FLT_MAX, neginf=-FLT_MAX)
        grid, codes = quantize_to_grid(codec, ranks, x)
        most = 2 ** codec.digits(ranks) - 1
        for value, code, unit in zip(
            x.tolist(), codes.tolist(), unit_of_each_element(codec, ranks, grid, 700), strict=True
        ):
            error = abs(Fraction(value) - code * unit)
            assert abs(code) <= most and (code == 0 or value != 0)
            assert error <= unit / 2 or (abs(code) == most and error < unit), (codec, value, code)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 9, 64, 1000, 2048])
@pytest.mark.parametrize("codec", GRIDS[::2], ids=str)
def test_no_sum_overflows(codec: Exact, ranks: int) -> None:
    """All ranks are at an end of the range: FLT_MAX, a largest element that rounds up, the smallest subnormals."""
    just_below = torch.tensor([1.0]).nextafter(torch.tensor([0.0])).item()
    for sign, value in itertools.product((1, -1), (FLT_MAX, just_below, 1.0, 1e-45, 1.1754942e-38)):
        _, codes = quantize_to_grid(codec, ranks, torch.full((codec.block,), sign * value))
        total = int(codes[0]) * ranks
        assert -(2 ** (codec.bits - 1)) < total < 2 ** (codec.bits - 1)
        assert int(codes[0]) * sign > 0 or value < 1e-38


@pytest.mark.parametrize("bits", [16, 32])
def test_the_result_is_the_quotient_rounded_once(bits: int) -> None:
    """The quotient of any integers and exponents rounds to the nearest fp32, ties to even, also subnormals and Inf."""
    codec, generator = Exact(bits=bits, block=16), torch.Generator().manual_seed(bits)
    grid = torch.arange(0, 255, dtype=torch.uint8)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (255 * 16,), generator=generator).to(
        codec.code_type
    )
    codes[::16], codes[1::16], codes[2::16] = 0, 1, -(2 ** (bits - 1))
    for ranks, divisor in ((1, 1), (3, 3), (8, 1), (100, 100)):
        out = torch.empty(codes.numel())
        local_tasks.dequantize(codec, ranks, codes, grid, divisor, out)()
        for code, got, unit in zip(
            codes.tolist(), out.tolist(), unit_of_each_element(codec, ranks, grid, len(codes)), strict=True
        ):
            assert got == nearest(code * unit / divisor), (code, unit)


def nearest(x: Fraction) -> float:
    """The fp32 nearest to a rational, ties to even."""
    if x == 0:
        return 0.0
    size = abs(x)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, -126)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(size / unit) * unit  # Python rounds halves to even
    value = float("inf") if rounded >= Fraction(2) ** 128 else float(rounded)
    return value if x > 0 else -value


def test_subnormals_are_exact_where_the_integers_hold_them() -> None:
    x = torch.arange(1, 2**20, 9973).float() * 2.0**-149
    grid, codes = quantize_to_grid(Exact(bits=32), 128, x)
    out = torch.empty_like(x)
    local_tasks.dequantize(Exact(bits=32), 128, codes, grid, 1, out)()
    assert torch.equal(out, x) and set(grid.tolist()) == {1}


@pytest.mark.parametrize("kernel", available())
def test_nan_and_inf_make_their_block_nan(kernel: str) -> None:
    """A NaN or Inf of any rank makes the block NaN for all and leaves residuals as they were; others are untouched."""
    codec = Exact(bits=16)
    with use(kernel):
        for bad in (torch.nan, torch.inf, -torch.inf):
            x, residual = torch.ones(96), torch.full((96,), 0.25)
            x[40] = bad
            grid, codes = quantize_to_grid(codec, 2, x, residual)
            assert grid.tolist() == [127, 255, 127] and codes[32:64].tolist() == [0] * 32
            assert residual[32:64].tolist() == [0.25] * 32 and residual[:32].tolist() == [0.0] * 32
            out = torch.empty(96, dtype=torch.bfloat16)
            local_tasks.dequantize(codec, 2, codes, grid, 1, out)()
            assert out[32:64].isnan().all() and (out[:32] == 1.25).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_gives_the_same_integers_and_results(kind: str, dtype: torch.dtype) -> None:
    for codec, n in itertools.product(GRIDS, (1, 33, 4096, 5000)):
        x = floats(kind, n, seed=n).to(dtype)
        results = []
        for kernel in available():
            with use(kernel):
                residual = torch.linspace(-1, 1, n)
                grid, codes = quantize_to_grid(codec, 5, x, residual)
                sums = torch.empty(-(-n // local_tasks.AUDIT_RUN), dtype=torch.int64)
                out = torch.empty(n, dtype=dtype)
                local_tasks.audit_checksums(codec, codes, sums)()
                local_tasks.dequantize(codec, 5, codes, grid, 3, out)()
                parts = (grid, codes, sums, residual, out)
                results.append([part.view(torch.uint8) for part in parts])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(a, b), (codec, n)


SHARED = ["", "ratio=0.3,values=fp32,", "ratio=1.0,"]


@pytest.mark.parametrize("options", SHARED)
@pytest.mark.parametrize("kind", KINDS)
def test_shared_positions_are_the_same_in_every_kernel(kind: str, options: str) -> None:
    codec = parse(f"randk:{options}positions=shared")
    for n, feed, dtype in itertools.product(
        (1, 100, 4097, 9000), (False, True), (torch.float32, torch.bfloat16)
    ):
        x = floats(kind, n, seed=n).to(dtype)
        results = []
        for kernel in available():
            with use(kernel):
                kept = codec.kept_in(n)  # type: ignore[attr-defined]
                values, owed, out = torch.empty(kept), torch.zeros(kept), torch.empty(n, dtype=dtype)
                residual = torch.linspace(-1, 1, n) if feed else None
                local_tasks.gather_values(codec, 99, 7, x, residual, values, owed)()  # type: ignore[arg-type]
                local_tasks.scatter_values(codec, 99, 7, not feed, values, out)()  # type: ignore[arg-type]
                if residual is not None:
                    local_tasks.restore_residual(codec, 99, 7, owed * 2, residual)()  # type: ignore[arg-type]
                parts = (values, owed, out, *(() if residual is None else (residual,)))
                results.append([part.view(torch.uint8) for part in parts])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(a, b), (codec, n, feed, dtype)
