"""What the numbers mean: error bounds, NaN and Inf, zeros, extremes, order of sums, types other than floats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtcomm.codecs import Codec, Float8, Integer, codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.codecs.cases import everything, few
from tests.kernels.inputs import floats

KERNELS = available()
INTEGERS = [each for each in everything() if isinstance(each, Integer)]
PLAIN = [each for each in INTEGERS if each.rotate == "none" and not each.spikes]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=KERNELS, autouse=True)
def kernel(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    with use(request.param):
        yield request.param


def round_trip(each: Codec | str, x: torch.Tensor) -> torch.Tensor:
    return decode(each, encode(each, x), x.numel(), x.dtype)


def coarseness(each: Codec) -> float:
    """The largest error of equal numbers in a block of their own, relative to them."""
    if isinstance(each, Float8) and each.round == "stochastic":
        return 2**-3 if each.element == "e4m3" else 2**-2
    return 2**-6


@pytest.mark.parametrize("each", PLAIN, ids=str)
def test_error_is_within_a_step(each: Integer) -> None:
    """Half a step to nearest, one step at random; a step is the block's largest magnitude or range over the levels,
    which rounding of the scale stretches by 2^-7 at most, and that of the zero point by the magnitude's 2^-8. A scale
    below the normal numbers makes zeros."""
    for kind in ("normal", "ties", "offset", "negative", "constant", "blocks_apart"):
        x = floats(kind, 2 * each.granularity + 11)
        if not each.symmetric:
            x = x.clamp(-1e38, 1e38)  # a range that fp32 cannot hold makes the block NaN
        y = round_trip(each, x)
        assert y.isfinite().all()
        missing = -len(x) % each.block
        blocks = torch.cat([x, x[-1:].expand(missing)]).view(-1, each.block).double()
        errors = (torch.cat([y, y[-1:].expand(missing)]).view(-1, each.block).double() - blocks).abs()
        size = blocks.abs().amax(1)
        span = size if each.symmetric else blocks.amax(1) - blocks.amin(1)
        if not each.symmetric and each.scale == "bf16":
            span = span + size * 2**-7
        step = span / each.levels * (1 + 2**-7)
        allowed = step * (0.5 if each.round == "nearest" else 1.0) + size * 2**-22 + each.levels * 2**-126
        assert (errors.amax(1) <= allowed).all(), kind


@pytest.mark.parametrize(
    "each", [each for each in PLAIN if each.round == "nearest" and each.symmetric], ids=str
)
def test_a_decoded_payload_encodes_to_itself(each: Integer) -> None:
    x = floats("normal", 3000)
    once = encode(each, x)
    assert torch.equal(encode(each, decode(each, once, 3000)), once)


@pytest.mark.parametrize("each", INTEGERS, ids=str)
def test_bad_numbers_stay_in_their_block(each: Integer) -> None:
    n = 4 * each.block
    for bad in (NAN, INF, -INF):
        x = floats("normal", n)
        x[each.block + 3] = bad
        y = round_trip(each, x)
        assert y[each.block : 2 * each.block].isnan().all()
        assert y[: each.block].isfinite().all() and y[2 * each.block :].isfinite().all()


def test_a_range_beyond_fp32_is_nan() -> None:
    x = torch.ones(96)
    x[40], x[41] = 3e38, -3e38
    y = round_trip("int8:symmetric=false", x)
    assert y[32:64].isnan().all() and torch.equal(y[:32], x[:32])
    assert round_trip("int8", x).isfinite().all()


@pytest.mark.parametrize("each", few(), ids=str)
def test_zeros_are_exact(each: Codec) -> None:
    y = round_trip(each, floats("zeros", 1500))
    assert not y.any()


@pytest.mark.parametrize("each", few(), ids=str)
def test_every_nan_is_the_same_one(each: Codec) -> None:
    """But for copies by `none`."""
    x = floats("bits", 3000)
    sums = reduce(each, [encode(each, x), encode(each, -x)], 3000)
    words = sums.view(torch.int32)[sums.isnan()]
    assert len(words) and (words == 0x7FC00000).all()


def test_none_copies_bits() -> None:
    x = floats("bits", 1000)
    for dtype in ELEMENT_TYPES:
        each = x.view(torch.uint8).clone().view(dtype) if dtype != torch.bool else x > 0
        payload = encode("none", each)
        size = each.numel() * each.itemsize
        assert torch.equal(payload[:size], each.view(torch.uint8))
        assert torch.equal(
            decode("none", payload, each.numel(), dtype).view(torch.uint8), each.view(torch.uint8)
        )
        assert torch.equal(
            reduce("none", [payload], each.numel(), dtype=dtype).view(torch.uint8), each.view(torch.uint8)
        )


@pytest.mark.parametrize(
    "each",
    [each for each in few() if each.name != "fp16" and getattr(each, "rotate", "none") == "none"],
    ids=str,
)
def test_extremes_survive_in_blocks_of_their_own(each: Codec) -> None:
    size = max(each.layout().block, 16)
    for value in (1e-30, 1e30, -3.38e38):
        x = torch.full((size,), value)
        assert torch.allclose(round_trip(each, x), x, rtol=coarseness(each), atol=0)


def test_fp16_follows_ieee() -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e9, 2.0**-24, 2.0**-25, 1.1 * 2**-25, -0.0, 1e-45])
    y = round_trip("fp16", x)
    assert y.tolist() == [65504.0, 65504.0, INF, -INF, 2.0**-24, 0.0, 2.0**-24, 0.0, 0.0]
    assert torch.signbit(y).tolist() == [False, False, False, True, False, False, False, True, False]


def test_sums_are_taken_in_rank_order_and_divided_once() -> None:
    terms = [torch.tensor([v]) for v in (1.0, 2.0**24, -(2.0**24))]
    for position in range(3):
        others = [encode("none", t) for i, t in enumerate(terms) if i != position]
        assert reduce("none", others, 1, terms[position], position).item() == 0.0  # (1 + 2^24) - 2^24
    assert reduce("none", [encode("none", torch.tensor([1.0]))] * 2, 1, divisor=3).item() == torch.tensor(
        2 / 3
    )


def test_the_default_position_is_last() -> None:
    payloads = [encode("none", torch.tensor([v])) for v in (1.0, 2.0**24)]
    assert reduce("none", payloads, 1, torch.tensor([-(2.0**24)])).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_summed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    x = [floats("normal", 700, seed=seed).to(dtype) for seed in range(5)]
    got = reduce("none", [encode("none", each) for each in x[1:]], 700, x[0], 0)
    exact = x[0].float()
    for each in x[1:]:
        exact = exact + each.float()
    assert got.dtype == dtype and torch.equal(got, exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_wrap(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(info.min, info.max, (1500,), dtype=dtype, generator=generator) for _ in range(2))
    payload = encode("none", x)
    for op, expected in (("sum", x + y), ("min", torch.minimum(x, y)), ("max", torch.maximum(x, y))):
        assert torch.equal(reduce("none", [payload], 1500, y, op=op), expected)
        assert torch.equal(reduce_encode("none", [payload], 1500, y, op=op), encode("none", expected))


def test_float64_is_summed_in_float64() -> None:
    x, y = (
        torch.randn(1500, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
    )
    payload = encode("none", x)
    assert torch.equal(reduce("none", [payload], 1500, y), x + y)
    assert torch.equal(reduce("none", [payload], 1500, y, divisor=3), (x + y) / 3)
    assert torch.equal(reduce("none", [payload], 1500, y, op="min"), torch.minimum(x, y))


def test_bool_is_logical() -> None:
    x, y = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    payload = encode("none", x)
    for op, expected in (("sum", x | y), ("max", x | y), ("min", x & y)):
        got = reduce("none", [payload], 4, y, op=op)
        assert got.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_nan_wins_min_and_max(dtype: torch.dtype) -> None:
    x = torch.tensor([NAN, 1.0, NAN, 0.0, -0.0, INF, -INF, 2.0], dtype=dtype)
    y = torch.tensor([1.0, NAN, NAN, -0.0, 0.0, 1.0, 1.0, 3.0], dtype=dtype)
    payload = encode("none", x)
    for op, torch_s in (("min", torch.minimum), ("max", torch.maximum)):
        got = reduce("none", [payload], 8, y, op=op)
        assert torch.equal(got.nan_to_num(9), torch_s(x, y).nan_to_num(9))
        assert torch.signbit(got)[3:5].tolist() == [False, True]  # of two zeros the first stays


@pytest.mark.parametrize("each", few(), ids=str)
def test_mass_is_conserved(each: Codec) -> None:
    """decoded + new residual = x + old residual, and for a divided sum divisor times the residual counts."""
    n = 2 * each.granularity + 5
    x, old = floats("normal", n), floats("normal", n, seed=4) * 0.01
    residual = old.clone()
    y = decode(each, encode(each, x, residual=residual), n)
    assert torch.allclose(y + residual, x + old, rtol=0, atol=1e-6)
    assert each.name == "none" or residual.any()

    other = encode(each, floats("normal", n, seed=6))
    residual = old.clone()
    mean = decode(each, reduce_encode(each, [other], n, x, 0, 4, residual), n)
    total = x.double() + old + decode(each, other, n)
    assert torch.allclose(mean * 4.0 + residual, total.float(), rtol=0, atol=2e-6)


def test_a_residual_that_is_no_number_stays() -> None:
    x, old = torch.ones(96), torch.full((96,), 0.25)
    x[40] = INF
    residual = old.clone()
    encode("int8", x, residual=residual)
    assert torch.equal(residual[32:64], old[32:64]) and not torch.equal(residual[:32], old[:32])
    x = torch.tensor([1.0, 1e9, NAN])  # an overflow of fp16 is not carried over either
    residual = torch.full((3,), 2.0**-13)
    encode("fp16", x, residual=residual)
    assert residual.tolist() == [2.0**-13, 2.0**-13, 2.0**-13]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=32), max_size=150),
    each=st.sampled_from(few()),
    cut=st.integers(0, 3),
)
def test_any_floats_round_trip_alike_in_every_kernel(values: list[float], each: Codec, cut: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)[cut:]
    payloads = []
    for name in KERNELS:
        with use(name):
            payloads.append((encode(each, x), round_trip(each, x)))
    wire, floats_ = payloads[-1]
    assert len(wire) == each.wire_bytes(x.numel())
    for got_wire, got_floats in payloads:
        assert torch.equal(got_wire, wire)
        assert torch.equal(got_floats.view(torch.int32), floats_.view(torch.int32))


@pytest.mark.parametrize("each", few(), ids=str)
def test_granules_do_not_know_each_other(each: Codec) -> None:
    """A payload cut at a granule decodes, and the granules of a longer tensor are those of its parts."""
    g = each.granularity
    x = floats("blocks_apart", 3 * g + 9)
    whole = encode(each, x, key=8)
    parts = [encode(each, x[:g], key=8), encode(each, x[g:], key=8, offset=g)]
    assert torch.equal(torch.cat(parts), whole)
    tail = decode(each, whole[each.wire_bytes(g) :].clone(), 2 * g + 9)
    assert torch.equal(tail.view(torch.int32), decode(each, whole, 3 * g + 9)[g:].view(torch.int32))


def test_defaults() -> None:
    assert codec("int8") == Integer(bits=8, block=32, scale="bf16", symmetric=True, round="nearest")
