"""8-bit floats: the OCP formats as torch implements them, e3m4 by its definition, every code, every tie, and stochastic
rounding."""

from __future__ import annotations

import pytest
import torch

from dtcomm import _C
from dtcomm.codecs import Float8
from dtcomm.codecs import codec as parse
from dtcomm.kernels import available
from dtcomm.kernels.ops import decode, encode, reduce
from tests.unit.codecs.cases import codecs_with_option_sets
from tests.unit.kernels.inputs import floats

FLOAT8 = [codec for codec in codecs_with_option_sets() if isinstance(codec, Float8)]
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e3m4": 30.0}
SUBNORMAL = {"e4m3": 2.0**-9, "e5m2": 2.0**-16, "e3m4": 2.0**-6}  # the smallest number above zero
PRECISION = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e3m4": 2.0**-5}  # half a unit of a normal number's last place
ALL = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def numbers_of_e3m4() -> torch.Tensor:
    """The value of every code: bias 3, subnormals in steps of 2^-6, and NaN where all bits but the sign are set."""
    subnormal = [i * 2.0**-6 for i in range(16)]
    normal = [(16 + i) * 2.0 ** (e - 7) for e in range(1, 8) for i in range(16)]
    positive = torch.tensor([*subnormal, *normal[:-1], float("nan")])
    return torch.cat([positive, -positive])


NUMBERS = {name: ALL.view(dtype).float() for name, dtype in TORCH.items()} | {"e3m4": numbers_of_e3m4()}


def nearest_codes(x: torch.Tensor, element: str) -> torch.Tensor:
    """The codes of numbers up to the largest one: to nearest, ties to the even code."""
    if element in TORCH:
        return x.to(TORCH[element]).view(torch.uint8)
    table, size = NUMBERS[element][:127].double(), x.double().abs()
    below = (torch.searchsorted(table, size, right=True) - 1).clamp(max=125)
    low, high = size - table[below], table[below + 1] - size
    up = (low > high) | ((low == high) & (below % 2 == 1))
    return (below + up + 128 * x.signbit()).to(torch.uint8)


every_kernel = pytest.mark.parametrize("kernel", available(), indirect=True)
pytestmark = pytest.mark.usefixtures("kernel")


def payload_of(codes: torch.Tensor, scale: float) -> torch.Tensor:
    """One block of 256 codes under a scale of fp32."""
    field = torch.tensor([scale]).view(torch.uint8)
    return torch.cat([field, codes, torch.zeros(12, dtype=torch.uint8)])


def codes_of(x: torch.Tensor, codec: str) -> torch.Tensor:
    """The codes of one block whose scale is 1."""
    payload = encode(codec, x)
    assert payload[:4].view(torch.float32).item() == 1.0
    return payload[4 : 4 + x.numel()]


@every_kernel
@pytest.mark.parametrize("element", NUMBERS)
@pytest.mark.parametrize("scale", [1.0, -0.37, 2.0**-126, 1e-40, 3e38, float("inf"), float("nan"), 0.0])
def test_every_code_decodes_by_definition(element: str, scale: float) -> None:
    """Also with scales that no encoder writes, and in sums."""
    codec = f"fp8_{element}:block=256,scale=fp32"
    payload = payload_of(ALL, scale)
    expected = NUMBERS[element] * torch.tensor(scale)
    decoded = decode(codec, payload, 256)
    nan = expected.isnan()
    assert torch.equal(decoded[~nan].view(torch.int32), expected[~nan].view(torch.int32))
    assert (decoded.view(torch.int32)[nan] == 0x7FC00000).all()
    total = reduce(codec, [payload, payload], 256)
    assert torch.equal(total.nan_to_num(1.5), (decoded + decoded).nan_to_num(1.5))


@every_kernel
@pytest.mark.parametrize("element", NUMBERS)
def test_encoding_rounds_to_nearest(element: str) -> None:
    """For every number, the midpoints of neighbours and the floats next to them, +-0 and subnormal floats."""
    numbers = NUMBERS[element][:127]
    numbers = numbers[numbers.isfinite()]
    halves = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, halves])
    x = torch.cat([x, torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(1e9))])
    x = x[x <= LARGEST[element]]
    x = torch.cat([x, -x, torch.tensor([1e-45, -1e-45, 1e-38, -2e-38])])
    x = torch.cat([x, torch.zeros(-x.numel() % 4096)])
    x[-1] = LARGEST[element]
    for block in x.view(-1, 4096):
        block[0] = LARGEST[element]
        codes = codes_of(block, f"fp8_{element}:block=4096,scale=fp32")
        assert torch.equal(codes, nearest_codes(block, element))


@pytest.mark.parametrize("codec", FLOAT8, ids=str)
def test_error_is_within_a_unit(codec: Float8) -> None:
    """Half a unit of the last place to nearest, a unit stochastically, plus the rounding error of the product."""
    for kind in ("normal", "offset", "negative", "constant", "blocks_apart"):
        x = floats(kind, 2 * codec.granularity + 11)
        y = decode(codec, encode(codec, x), x.numel())
        assert y.isfinite().all()
        missing = -len(x) % codec.block
        rows, got = (torch.cat([t, t.new_zeros(missing)]).view(-1, codec.block).double() for t in (x, y))
        scale = rows.abs().amax(1, keepdim=True) / LARGEST[codec.element] * (1 + 2**-7)
        unit = torch.maximum(2 * PRECISION[codec.element] * rows.abs(), SUBNORMAL[codec.element] * scale)
        allowed = unit * (0.5 if codec.round == "nearest" else 1.0) * (1 + 2**-6) + rows.abs() * 2**-22
        # A block below the smallest normal scale is zeros.
        allowed = torch.where(scale < 2.0**-125, rows.abs(), allowed)
        assert ((got - rows).abs() <= allowed).all(), kind


@pytest.mark.parametrize("codec", [codec for codec in FLOAT8 if codec.round == "nearest"], ids=str)
def test_a_decoded_payload_encodes_to_itself(codec: Float8) -> None:
    x = floats("normal", 3000)
    payload = encode(codec, x)
    assert torch.equal(encode(codec, decode(codec, payload, 3000)), payload)


@pytest.mark.parametrize("codec", FLOAT8, ids=str)
def test_nan_and_inf_affect_only_their_block(codec: Float8) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = floats("normal", 4 * codec.block)
        x[codec.block + 3] = bad
        y = decode(codec, encode(codec, x), x.numel()).view(-1, codec.block)
        assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()


@every_kernel
@pytest.mark.parametrize("element", NUMBERS)
def test_blocks_too_small_for_a_scale_encode_to_zero_bytes(element: str) -> None:
    payload = encode(f"fp8_{element}", torch.full((128,), -1e-38))
    assert not payload.any()


@pytest.mark.parametrize("codec", [codec for codec in FLOAT8 if codec.round == "stochastic"], ids=str)
def test_stochastic_rounding_is_unbiased(codec: Float8) -> None:
    """Means over keys lie within five standard errors of x, of each element and, sharper, of all together."""
    n, keys = 4096, 300
    x = floats("normal", n, seed=1) ** 5 + 0.3  # of many sizes
    mean = torch.zeros(n, dtype=torch.float64)
    for key in range(keys):
        mean += decode(codec, encode(codec, x, key=_C.mix_key(1, 0, key)), n).double() / keys
    table = NUMBERS[codec.element][:127].double()
    table = table[table.isfinite()]
    payload = encode(codec, x)
    layout = codec.layout()
    scales = []
    for granule in payload.view(-1, layout.bytes(layout.granule)):
        field = granule[: layout.codes_at(layout.granule)]
        scales.append(field.view(torch.bfloat16 if codec.scale == "bf16" else torch.float32).double())
    scale = torch.cat(scales).repeat_interleave(codec.block)
    t = x.double().abs() / scale
    below = (torch.searchsorted(table, t, right=True) - 1).clamp(max=len(table) - 2)
    step = table[below + 1] - table[below]
    fraction = (t - table[below]) / step
    variance = (fraction * (1 - fraction)).clamp(min=0) * (step * scale) ** 2 / keys
    error = mean - x.double()
    # A landing that is expected less than once in all keys is not normally distributed: allow for a few.
    assert (error.abs() <= 5 * variance.sqrt() + 4 * step * scale / keys).all()
    assert error.sum().abs() < 5 * variance.sum().sqrt()


def test_defaults() -> None:
    assert parse("fp8_e4m3") == Float8(element="e4m3", block=128, scale="bf16", round="nearest")
    assert parse("fp8_e5m2").wire_bytes(1024) == 1024 + 16
    assert parse("fp8_e3m4") == Float8(element="e3m4") and parse("fp8_e3m4").wire_bytes(1024) == 1024 + 16


@pytest.mark.parametrize("spec", ["fp8_e4m3:element=e5m2", "fp8_e4m3:symmetric=false", "fp8_e5m2:block=100"])
def test_wrong_options_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"option"):
        parse(spec)


def test_a_wrong_element_is_refused() -> None:
    with pytest.raises(ValueError, match="element: expected e4m3, e5m2 or e3m4, got e2m1"):
        Float8(element="e2m1")
