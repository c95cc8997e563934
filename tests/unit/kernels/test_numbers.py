"""Numerical properties: error bounds, NaN and Inf, zeros, extremes, order of sums, types other than floats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtcomm.codecs import Codec, Float8, Integer, VariableInteger
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.codecs.minifloat import Mx
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.codecs.cases import codecs_with_option_sets, codecs_with_single_changes
from tests.unit.kernels.inputs import floats

KERNELS = available()
INTEGERS = [codec for codec in codecs_with_option_sets() if isinstance(codec, Integer)]
PLAIN = [codec for codec in INTEGERS if codec.rotate == "none" and not codec.spikes]
NAN, INF = float("nan"), float("inf")


every_kernel = pytest.mark.parametrize("kernel", available(), indirect=True)
pytestmark = pytest.mark.usefixtures("kernel")


def round_trip(codec: Codec | str, x: torch.Tensor) -> torch.Tensor:
    return decode(codec, encode(codec, x), x.numel(), x.dtype)


def relative_error_bound(codec: Codec) -> float:
    """Return the largest relative error of a block of equal numbers."""
    if isinstance(codec, Float8) and codec.round == "stochastic":
        return {"e3m4": 2**-4, "e4m3": 2**-3, "e5m2": 2**-2}[codec.element]
    if isinstance(codec, Integer) and codec.round == "stochastic":
        return 2**-6 + 1 / codec.levels
    if isinstance(codec, Mx):  # the largest number is not the largest that the scale's power of two allows
        return 2**-2 if codec.element == "e2m1" else 2**-3
    if isinstance(codec, VariableInteger):  # the scale is rounded up to four significant bits
        return 2**-3
    return 2**-6


@pytest.mark.parametrize("codec", PLAIN, ids=str)
def test_error_is_within_a_step(codec: Integer) -> None:
    """Half a step to nearest, one step at random; a step is the block's largest magnitude or range over the levels,
    which rounding of the scale stretches by 2^-7 at most, and that of the zero point by the magnitude's 2^-8. A scale
    below the normal numbers makes zeros."""
    for kind in ("normal", "ties", "offset", "negative", "constant", "blocks_apart"):
        x = floats(kind, 2 * codec.granularity + 11)
        if not codec.symmetric:
            x = x.clamp(-1e38, 1e38)  # a range that fp32 cannot hold makes the block NaN
        y = round_trip(codec, x)
        assert y.isfinite().all()
        missing = -len(x) % codec.block
        blocks = torch.cat([x, x[-1:].expand(missing)]).view(-1, codec.block).double()
        errors = (torch.cat([y, y[-1:].expand(missing)]).view(-1, codec.block).double() - blocks).abs()
        size = blocks.abs().amax(1)
        span = size if codec.symmetric else blocks.amax(1) - blocks.amin(1)
        if not codec.symmetric and codec.scale == "bf16":
            span = span + size * 2**-7
        step = span / codec.levels * (1 + 2**-7)
        allowed = step * (0.5 if codec.round == "nearest" else 1.0) + size * 2**-22 + codec.levels * 2**-126
        assert (errors.amax(1) <= allowed).all(), kind


@pytest.mark.parametrize(
    "codec", [codec for codec in PLAIN if codec.round == "nearest" and codec.symmetric], ids=str
)
def test_a_decoded_payload_encodes_to_itself(codec: Integer) -> None:
    x = floats("normal", 3000)
    payload = encode(codec, x)
    assert torch.equal(encode(codec, decode(codec, payload, 3000)), payload)


@pytest.mark.parametrize("codec", INTEGERS, ids=str)
def test_nan_and_inf_affect_only_their_block(codec: Integer) -> None:
    n = 4 * codec.block
    for bad in (NAN, INF, -INF):
        x = floats("normal", n)
        x[codec.block + 3] = bad
        y = round_trip(codec, x)
        assert y[codec.block : 2 * codec.block].isnan().all()
        assert y[: codec.block].isfinite().all() and y[2 * codec.block :].isfinite().all()


@every_kernel
@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_are_split_into_bit_planes(bits: int) -> None:
    """The bytes of known codes: 1, -1, L, -L, 0, ... of a block whose scale is 1, cut into planes by hand."""
    top = 2 ** (bits - 1) - 1
    codes = [1, -1, top, -top, 0, top, top - 1, 1 - top] * 4
    payload = encode(f"int{bits}", torch.tensor(codes, dtype=torch.float32)).tolist()
    assert payload[:2] == [0x80, 0x3F]  # bf16: 1.0
    expected, low = 0, 0
    for unit in (8, 4, 2, 1):
        if bits & unit:
            for i, code in enumerate(codes):
                expected |= ((code & 2**bits - 1) >> low & 2**unit - 1) << (low * 32 + i * unit)
            low += unit
    assert int.from_bytes(bytes(payload[2 : 2 + 4 * bits]), "little") == expected
    assert not any(payload[2 + 4 * bits :])
    assert round_trip(f"int{bits}", torch.tensor(codes, dtype=torch.float32)).tolist() == codes


@every_kernel
def test_known_bytes_of_int3() -> None:
    """Sixteen codes 0, 1, 2, 3, -3, -2, -1, 0, ...: in the plane of two bits 0, 1, 2, 3, 1, 2, 3, 0, in that of one
    bit 0, 0, 0, 0, 1, 1, 1, 0."""
    x = torch.tensor([0.0, 1, 2, 3, -3, -2, -1, 0] * 2)
    payload = encode("int3:block=16", x)
    assert payload.tolist() == [0x80, 0x3F, 0xE4, 0x39, 0xE4, 0x39, 0x70, 0x70] + [0] * 8


@every_kernel
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_code_of_a_payload_decodes(bits: int, symmetric: bool) -> None:
    """Also codes that no encoder writes: two's complement without and with the most negative code."""
    codec = Integer(bits=bits, block=256, scale="fp32", symmetric=symmetric)
    codes = torch.arange(256) % 2**bits
    payload = torch.zeros(codec.wire_bytes(256), dtype=torch.uint8)
    fields = torch.tensor([0.25] if symmetric else [0.25, -3.0])
    payload[: 4 * len(fields)] = fields.view(torch.uint8)
    bytes_, low = bytearray(), 0
    for unit in (8, 4, 2, 1):
        if bits & unit:
            digits = (codes >> low) % 2**unit
            bytes_ += sum(int(digit) << i * unit for i, digit in enumerate(digits)).to_bytes(
                32 * unit, "little"
            )
            low += unit
    payload[4 * len(fields) : 4 * len(fields) + 32 * bits] = torch.tensor(list(bytes_), dtype=torch.uint8)
    signed = torch.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if symmetric else codes
    expected = signed * 0.25 + (0.0 if symmetric else -3.0)
    assert torch.equal(decode(codec, payload, 256), expected)


@every_kernel
@pytest.mark.parametrize(
    "codec",
    [codec for codec in codecs_with_single_changes() if isinstance(codec, Integer) and not codec.spikes],
    ids=str,
)
def test_nan_and_inf_fields_decode_to_the_canonical_nan(codec: Integer) -> None:
    """No encoder writes an infinite scale or a NaN of other bits; the other bytes are random."""
    n, layout = 2 * codec.granularity, codec.layout()
    size = layout.field_bytes
    generator = torch.Generator().manual_seed(codec.bits)
    payload = torch.randint(0, 256, (codec.wire_bytes(n),), dtype=torch.uint8, generator=generator)
    words = {2: (0x7F80, 0xFF80, 0x7F81, 0xFFFF), 4: (0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF)}[size]
    fields = payload[: layout.fields * layout.blocks(codec.granularity) * size]
    fields[size - 1 :: size] &= 0x3F  # numbers, all of them
    for i, word in enumerate(words[: layout.fields * layout.blocks(codec.granularity)]):
        fields[i * size : (i + 1) * size] = torch.tensor(list(word.to_bytes(size, "little")))
    decoded = decode(codec, payload, n)
    with use("reference"):
        assert torch.equal(decoded.view(torch.int32), decode(codec, payload, n).view(torch.int32))
    nan_blocks = decoded[: min(len(words), layout.blocks(codec.granularity)) * codec.block]
    assert (nan_blocks.view(torch.int32) == 0x7FC00000).all()


@every_kernel
def test_a_range_beyond_fp32_is_nan() -> None:
    x = torch.ones(96)
    x[40], x[41] = 3e38, -3e38
    y = round_trip("int8:symmetric=false", x)
    assert y[32:64].isnan().all() and torch.equal(y[:32], x[:32])
    assert round_trip("int8", x).isfinite().all()


@pytest.mark.parametrize("codec", codecs_with_single_changes(), ids=str)
def test_zeros_are_exact(codec: Codec) -> None:
    y = round_trip(codec, floats("zeros", 1500))
    assert not y.any()


@pytest.mark.parametrize("codec", codecs_with_single_changes(), ids=str)
def test_sums_hold_only_the_canonical_nan(codec: Codec) -> None:
    """Sums hold the canonical NaN only; `none` copies other NaNs."""
    x = floats("bits", 3000)
    sums = reduce(codec, [encode(codec, x), encode(codec, -x)], 3000)
    words = sums.view(torch.int32)[sums.isnan()]
    assert len(words) and (words == 0x7FC00000).all()


@every_kernel
def test_none_copies_all_bits() -> None:
    x = floats("bits", 1000)
    for dtype in ELEMENT_TYPES:
        values = x.view(torch.uint8).clone().view(dtype) if dtype != torch.bool else x > 0
        payload = encode("none", values)
        size = values.numel() * values.itemsize
        assert torch.equal(payload[:size], values.view(torch.uint8))
        assert torch.equal(
            decode("none", payload, values.numel(), dtype).view(torch.uint8), values.view(torch.uint8)
        )
        assert torch.equal(
            reduce("none", [payload], values.numel(), dtype=dtype).view(torch.uint8), values.view(torch.uint8)
        )


@pytest.mark.parametrize(
    "codec",
    [
        codec
        for codec in codecs_with_single_changes()
        if codec.name != "fp16" and getattr(codec, "rotate", "none") == "none" and not codec.layout().kept
    ],
    ids=str,
)
def test_blocks_of_one_extreme_value_keep_it(codec: Codec) -> None:
    size = max(codec.layout().block, 16)
    for value in (1e-30, 1e30, -3.38e38):
        x = torch.full((size,), value)
        assert torch.allclose(round_trip(codec, x), x, rtol=relative_error_bound(codec), atol=0)


@every_kernel
def test_fp16_follows_ieee() -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e9, 2.0**-24, 2.0**-25, 1.1 * 2**-25, -0.0, 1e-45])
    y = round_trip("fp16", x)
    assert y.tolist() == [65504.0, 65504.0, INF, -INF, 2.0**-24, 0.0, 2.0**-24, 0.0, 0.0]
    assert torch.signbit(y).tolist() == [False, False, False, True, False, False, False, True, False]


@every_kernel
def test_sums_are_taken_in_rank_order_and_divided_once() -> None:
    terms = [torch.tensor([v]) for v in (1.0, 2.0**24, -(2.0**24))]
    for position in range(3):
        others = [encode("none", t) for i, t in enumerate(terms) if i != position]
        assert reduce("none", others, 1, terms[position], position).item() == 0.0  # (1 + 2^24) - 2^24
    assert reduce("none", [encode("none", torch.tensor([1.0]))] * 2, 1, divisor=3).item() == torch.tensor(
        2 / 3
    )


def test_the_default_position_of_the_local_term_is_last() -> None:
    payloads = [encode("none", torch.tensor([v])) for v in (1.0, 2.0**24)]
    assert reduce("none", payloads, 1, torch.tensor([-(2.0**24)])).item() == 0.0


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_summed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    x = [floats("normal", 700, seed=seed).to(dtype) for seed in range(5)]
    total = reduce("none", [encode("none", term) for term in x[1:]], 700, x[0], 0)
    exact = x[0].float()
    for term in x[1:]:
        exact = exact + term.float()
    assert total.dtype == dtype and torch.equal(total, exact.to(dtype))


@every_kernel
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_wrap(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(info.min, info.max, (1500,), dtype=dtype, generator=generator) for _ in range(2))
    payload = encode("none", x)
    for op, expected in (("sum", x + y), ("min", torch.minimum(x, y)), ("max", torch.maximum(x, y))):
        assert torch.equal(reduce("none", [payload], 1500, y, op=op), expected)
        assert torch.equal(reduce_encode("none", [payload], 1500, y, op=op), encode("none", expected))


@every_kernel
def test_float64_is_summed_in_float64() -> None:
    x, y = (
        torch.randn(1500, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
    )
    payload = encode("none", x)
    assert torch.equal(reduce("none", [payload], 1500, y), x + y)
    assert torch.equal(reduce("none", [payload], 1500, y, divisor=3), (x + y) / 3)
    assert torch.equal(reduce("none", [payload], 1500, y, op="min"), torch.minimum(x, y))


@every_kernel
def test_bool_is_logical() -> None:
    x, y = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    payload = encode("none", x)
    for op, expected in (("sum", x | y), ("max", x | y), ("min", x & y)):
        result = reduce("none", [payload], 4, y, op=op)
        assert result.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_min_and_max_with_nan_are_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([NAN, 1.0, NAN, 0.0, -0.0, INF, -INF, 2.0], dtype=dtype)
    y = torch.tensor([1.0, NAN, NAN, -0.0, 0.0, 1.0, 1.0, 3.0], dtype=dtype)
    payload = encode("none", x)
    for op, torch_s in (("min", torch.minimum), ("max", torch.maximum)):
        result = reduce("none", [payload], 8, y, op=op)
        assert torch.equal(result.nan_to_num(9), torch_s(x, y).nan_to_num(9))
        assert torch.signbit(result)[3:5].tolist() == [False, True]  # of two zeros the first stays


@pytest.mark.parametrize("codec", codecs_with_single_changes(), ids=str)
def test_mass_is_conserved(codec: Codec) -> None:
    """decoded + new residual = x + old residual, and for a divided sum divisor times the residual counts."""
    n = 2 * codec.granularity + 5
    x, old = floats("normal", n), floats("normal", n, seed=4) * 0.01
    residual = old.clone()
    y = decode(codec, encode(codec, x, residual=residual), n)
    assert torch.allclose(y + residual, x + old, rtol=0, atol=1e-6)
    assert codec.name == "none" or residual.any()

    other = encode(codec, floats("normal", n, seed=6))
    residual = old.clone()
    mean = decode(codec, reduce_encode(codec, [other], n, x, 0, 4, residual), n)
    total = x.double() + old + decode(codec, other, n)
    # randk's decoded elements are n / k times as large, and so is the rounding of their sum.
    assert torch.allclose(mean * 4.0 + residual, total.float(), rtol=2**-22, atol=2e-6)


@every_kernel
def test_residuals_of_nan_and_inf_stay() -> None:
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
    codec=st.sampled_from(codecs_with_single_changes()),
    cut=st.integers(0, 3),
)
def test_every_kernel_round_trips_any_floats_to_the_same_bits(
    values: list[float], codec: Codec, cut: int
) -> None:
    x = torch.tensor(values, dtype=torch.float32)[cut:]
    payloads = []
    for name in KERNELS:
        with use(name):
            payloads.append((encode(codec, x), round_trip(codec, x)))
    wire, floats_ = payloads[-1]
    assert len(wire) == codec.wire_bytes(x.numel())
    for got_wire, got_floats in payloads:
        assert torch.equal(got_wire, wire)
        assert torch.equal(got_floats.view(torch.int32), floats_.view(torch.int32))


@pytest.mark.parametrize("codec", codecs_with_single_changes(), ids=str)
def test_granules_are_independent(codec: Codec) -> None:
    """A payload cut at a granule decodes, and the granules of a longer tensor are those of its parts."""
    g = codec.granularity
    x = floats("blocks_apart", 3 * g + 9)
    whole = encode(codec, x, key=8)
    parts = [encode(codec, x[:g], key=8), encode(codec, x[g:], key=8, offset=g)]
    assert torch.equal(torch.cat(parts), whole)
    tail = decode(codec, whole[codec.wire_bytes(g) :].clone(), 2 * g + 9)
    assert torch.equal(tail.view(torch.int32), decode(codec, whole, 3 * g + 9)[g:].view(torch.int32))


def test_defaults() -> None:
    assert parse("int8") == Integer(bits=8, block=32, scale="bf16", symmetric=True, round="nearest")
