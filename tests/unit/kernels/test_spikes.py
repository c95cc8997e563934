"""Option spikes=1: the smallest and largest element of each block are exact; codes cover the range of the others."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dtcomm.codecs import Codec, Integer
from dtcomm.codecs import codec as parse
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce
from tests.unit.codecs.cases import codecs_with_option_sets
from tests.unit.kernels.inputs import floats

SPIKED = [codec for codec in codecs_with_option_sets() if isinstance(codec, Integer) and codec.spikes]
PLAIN = [codec for codec in SPIKED if codec.rotate == "none"]
NAN, INF = float("nan"), float("inf")
LARGEST = 3.3895313892515355e38  # of bf16


every_kernel = pytest.mark.parametrize("kernel", available(), indirect=True)
pytestmark = pytest.mark.usefixtures("kernel")


def read_section(codec: Codec, payload: torch.Tensor, numel: int) -> tuple[list[float], list[int]]:
    """Return the values and places in the section of a payload of one granule."""
    layout = codec.layout()
    count, start = 2 * layout.blocks(numel), layout.spikes_at(numel)
    middle = start + count * layout.field_bytes
    values = payload[start:middle].clone().view({2: torch.bfloat16, 4: torch.float32}[layout.field_bytes])
    kind = torch.uint8 if layout.block <= 256 else torch.uint16
    places = payload[middle : layout.codes_at(numel)].clone().view(kind)
    return values.tolist(), places.tolist()


@every_kernel
@pytest.mark.parametrize(
    ("x", "values", "places"),
    [
        ([1.0, 5.0, -2.0, 5.0, -2.0], [-2.0, 5.0], [2, 1]),
        ([3.0], [3.0, 3.0], [0, 0]),
        ([3.0, 4.0], [3.0, 4.0], [0, 1]),
        ([2.0] * 40, [2.0] * 4, [0, 0, 0, 0]),
        ([0.0, -0.0, 0.0, -0.0], [-0.0, 0.0], [1, 0]),
        ([1.0, NAN, 2.0], [NAN, NAN], [0, 0]),
        ([1.0, 2.0, -INF], [NAN, NAN], [0, 0]),
        ([3.4e38, 0.0, -3.4e38], [-LARGEST, LARGEST], [2, 0]),
        ([1.00390625, 0.0, -1.01171875], [-1.015625, 1.0], [2, 0]),  # ties
        ([1e-45, 1e-40], [0.0, 1e-40], [0, 1]),
    ],
)
def test_known_sections(x: list[float], values: list[float], places: list[int]) -> None:
    codec = parse("int8:spikes=1")
    written_values, written_places = read_section(codec, encode(codec, torch.tensor(x)), len(x))
    expected = torch.tensor(values).to(torch.bfloat16)
    assert torch.equal(torch.tensor(written_values).nan_to_num(7), expected.float().nan_to_num(7))
    assert (
        torch.equal(torch.signbit(torch.tensor(written_values)), torch.signbit(expected))
        or expected.isnan().any()
    )
    assert written_places == places


def test_long_blocks_have_two_bytes_a_place() -> None:
    codec = parse("int8:block=1024,scale=fp32,spikes=1")
    x = floats("normal", 1024)
    x[1000], x[777] = 1e9 + 0.0, -123456.789
    values, places = read_section(codec, encode(codec, x), 1024)
    assert places == [777, 1000] and torch.equal(torch.tensor(values), x[[777, 1000]])


@pytest.mark.parametrize("codec", PLAIN, ids=str)
def test_bytes_outside_the_section_equal_the_plain_codec(codec: Integer) -> None:
    """The bytes around the section are those of the blocks with both places filled."""
    n = codec.granularity
    x = floats("normal", n) * 10 + floats("offset", n)
    filled = x.clone().view(-1, codec.block)
    for row in filled:
        low, high = int(row.argmin()), int(row.argmax())
        row[low] = row[high] = row[next(i for i in range(3) if i not in (low, high))]
    plain = dataclasses.replace(codec, spikes=0)
    p, q = encode(codec, x, 4, 2), encode(plain, filled.reshape(-1), 4, 2)
    start = codec.layout().spikes_at(n)
    assert torch.equal(p[:start], q[:start])
    codes = q[start : plain.layout().used(n)]
    assert torch.equal(p[codec.layout().codes_at(n) : codec.layout().used(n)], codes)
    y = decode(codec, p, n).view(-1, codec.block)
    relative = 2**-8 if codec.round == "nearest" else 2**-7
    for at in (x.view(-1, codec.block).argmin(1), x.view(-1, codec.block).argmax(1)):
        decoded, original = (t.gather(1, at[:, None]) for t in (y, x.view(-1, codec.block)))
        assert (
            (decoded - original).abs() <= original.abs() * (0 if codec.scale == "fp32" else relative)
        ).all()


def test_an_outlier_does_not_increase_the_error_of_its_block() -> None:
    x = floats("normal", 4096)
    x[::32] *= 1e6
    spiked = decode("int8:spikes=1", encode("int8:spikes=1", x), 4096)
    small = torch.arange(4096) % 32 != 0
    assert (spiked - x)[small].abs().max() < 0.03
    assert (decode("int8", encode("int8", x), 4096) - x)[small].abs().max() > 0.3


@every_kernel
@pytest.mark.parametrize("codec", SPIKED, ids=str)
def test_kernels_decode_any_bytes_alike(codec: Integer) -> None:
    """Places outside of their block are ignored; every NaN is the canonical NaN."""
    n = codec.granularity + codec.block + 3
    generator = torch.Generator().manual_seed(1)
    payload = torch.randint(0, 256, (codec.wire_bytes(n),), generator=generator, dtype=torch.int32)
    payload = payload.to(torch.uint8)
    local = floats("normal", n)
    with use("reference"):
        expected = decode(codec, payload, n), reduce(codec, [payload, payload], n, local, 1)
    results = decode(codec, payload, n), reduce(codec, [payload, payload], n, local, 1)
    for a, b in zip(results, expected, strict=True):
        nan = a.isnan()
        assert torch.equal(nan, b.isnan()) and torch.equal(
            a[~nan].view(torch.int32), b[~nan].view(torch.int32)
        )
