"""MX formats: the tables of the OCP specification, scales computed by hand, and decoding of any byte."""

from __future__ import annotations

import math

import pytest
import torch

from dtcomm.codecs import Mxfp4, Mxfp8
from dtcomm.codecs import codec as parse
from dtcomm.codecs.minifloat import Mx
from dtcomm.kernels import available
from dtcomm.kernels.ops import decode, encode, reduce
from tests.unit.codecs.cases import codecs_with_option_sets
from tests.unit.kernels.inputs import floats

MX = [codec for codec in codecs_with_option_sets() if isinstance(codec, Mx) and codec.rotate == "none"]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # table 5 of the specification
EMAX = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
PRECISION = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e2m1": 2.0**-2}  # half a unit of a normal number's last place
NAN, INF = float("nan"), float("inf")


every_kernel = pytest.mark.parametrize("kernel", available(), indirect=True)
pytestmark = pytest.mark.usefixtures("kernel")


def block_of(values: list[float]) -> torch.Tensor:
    return torch.tensor(values + [0.0] * (32 - len(values)))


@every_kernel
def test_e2m1_codes_decode_as_in_the_specification() -> None:
    x = block_of(E2M1 + [-value for value in E2M1])
    payload = encode("mxfp4", x)
    assert payload[0] == 127  # 2^0
    assert payload[1:9].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    decoded = decode("mxfp4", payload, 32)
    assert torch.equal(decoded.view(torch.int32), x.view(torch.int32))


@every_kernel
def test_e2m1_rounds_to_nearest_even_and_saturates() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    ends = torch.tensor([7.0, 7.9999995, 6.0])
    cases = [
        (halves, [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]),
        (torch.nextafter(halves, torch.tensor(INF)), E2M1[1:]),
        (torch.nextafter(halves, torch.tensor(0.0)), E2M1[:7]),
    ]
    for inputs, expected in cases:
        for sign in (1.0, -1.0):
            x = block_of((sign * torch.cat([inputs, ends])).tolist())
            decoded = decode("mxfp4", encode("mxfp4", x), 32)
            assert decoded[:10].tolist() == [sign * value for value in [*expected, 6.0, 6.0, 6.0]]


@every_kernel
@pytest.mark.parametrize("codec", MX, ids=str)
@pytest.mark.parametrize(
    ("top", "exponent"),
    [
        (1.0, 0),
        (1.9999999, 0),
        (2.0, 1),
        (0.75, -1),
        (2.0**-100, -100),
        (3.4028235e38, 127),
        (1e-30, -100),
        (1e30, 99),
    ],
)
def test_scales_computed_by_hand(codec: Mx, top: float, exponent: int) -> None:
    payload = encode(codec, block_of([top / 8, -top, 0.0]))
    assert payload[0] == 127 + exponent - EMAX[codec.element]


@every_kernel
@pytest.mark.parametrize("codec", MX, ids=str)
def test_scales_at_the_ends(codec: Mx) -> None:
    emax = EMAX[codec.element]
    assert not encode(codec, torch.full((32,), -0.0)).any()
    assert not encode(codec, torch.full((32,), -(2.0**-126))).any()  # 2^(1 - emax) is no byte
    assert not encode(codec, torch.full((32,), -1e-45)).any()
    smallest = encode(codec, torch.full((32,), 2.0 ** (emax - 126)))
    assert smallest[0] == 1 and smallest[1:17].all()
    for bad in (NAN, INF, -INF):
        x = floats("normal", 96)
        x[40] = bad
        payload = encode(codec, x)
        codes = payload[3 : 3 + 96 * codec.code_bits // 8].view(3, -1)
        assert payload[1] == 255 and not codes[1].any() and codes[0].any() and codes[2].any()
        decoded = decode(codec, payload, 96).view(3, 32)
        assert (decoded[1].view(torch.int32) == 0x7FC00000).all() and decoded[[0, 2]].isfinite().all()


@pytest.mark.parametrize("codec", MX, ids=str)
def test_error_is_within_a_unit(codec: Mx) -> None:
    """Half a unit, or the saturation above the largest number: an eighth or a quarter at most."""
    for kind in ("normal", "offset", "negative", "constant", "blocks_apart"):
        x = floats(kind, 4096)
        y = decode(codec, encode(codec, x), 4096)
        rows, decoded_rows = x.view(-1, 32).double(), y.view(-1, 32).double()
        top = rows.abs().amax(1, keepdim=True)
        scale = 2.0 ** (torch.floor(torch.log2(top.clamp(min=2.0**-140))) - EMAX[codec.element])
        unit = torch.maximum(
            2 * PRECISION[codec.element] * rows.abs(), scale * LARGEST[codec.element] * 2.0**-24
        )
        smallest = {"e4m3": 2.0**-9, "e5m2": 2.0**-16, "e2m1": 0.5}[codec.element]
        allowed = torch.maximum(unit, smallest * scale) / 2
        allowed = torch.maximum(allowed, rows.abs() - LARGEST[codec.element] * scale)
        allowed = torch.where(scale < 2.0**-126, rows.abs(), allowed)
        assert ((decoded_rows - rows).abs() <= allowed).all(), kind


@pytest.mark.parametrize("codec", MX, ids=str)
def test_a_decoded_payload_encodes_to_itself(codec: Mx) -> None:
    payload = encode(codec, floats("normal", 3000))
    assert torch.equal(encode(codec, decode(codec, payload, 3000)), payload)


@every_kernel
@pytest.mark.parametrize("codec", MX, ids=str)
def test_every_scale_with_every_code_decodes(codec: Mx) -> None:
    """Every scale with every code: the product, or the canonical NaN."""
    if codec.element == "e2m1":
        table = torch.tensor(E2M1 + [-value for value in E2M1])
        codes = torch.arange(16, dtype=torch.int32).repeat(2)
        raw = (codes[0::2] | codes[1::2] << 4).to(torch.uint8)
        places, numbers = 1, table[codes]
    else:
        kind = torch.float8_e4m3fn if codec.element == "e4m3" else torch.float8_e5m2
        raw = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        places, numbers = 8, raw.view(kind).float()
    for k in range(256):
        fields = torch.full((places,), k, dtype=torch.uint8)
        payload = torch.cat([fields, raw])
        payload = torch.cat([payload, torch.zeros(-len(payload) % 16, dtype=torch.uint8)])
        decoded = decode(codec, payload, len(numbers))
        scale = math.nan if k == 255 else math.ldexp(1.0, k - 127)
        expected = (numbers.double() * scale).float()
        nan = expected.isnan()
        assert torch.equal(decoded[~nan].view(torch.int32), expected[~nan].view(torch.int32))
        assert (decoded.view(torch.int32)[nan] == 0x7FC00000).all()
        total = reduce(codec, [payload, payload], len(numbers))
        assert torch.equal(total.nan_to_num(1.5), (expected + expected).nan_to_num(1.5))


def test_defaults_and_sizes() -> None:
    assert parse("mxfp8") == Mxfp8(element="e4m3") and str(Mxfp8(element="e5m2")) == "mxfp8:element=e5m2"
    assert parse("mxfp8").wire_bytes(1024) == 1024 + 32
    assert parse("mxfp4") == Mxfp4() and parse("mxfp4").wire_bytes(1024) == 512 + 32


@pytest.mark.parametrize(
    "spec", ["mxfp8:element=e2m1", "mxfp8:block=64", "mxfp4:element=e4m3", "mxfp4:scale=bf16"]
)
def test_wrong_options_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="option"):
        parse(spec)


def test_a_wrong_element_is_refused() -> None:
    with pytest.raises(ValueError, match="element: expected e2m1, got e4m3"):
        Mxfp4(element="e4m3")
