"""NVFP4: codes and scales computed by hand, the range of scales, blocks that are not finite, and any payload."""

from __future__ import annotations

import math

import pytest
import torch

from dtcomm.codecs import Nvfp4
from dtcomm.codecs import codec as parse
from dtcomm.kernels import available
from dtcomm.kernels.ops import decode, encode, reduce
from tests.unit.kernels.inputs import floats

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NAN, INF = float("nan"), float("inf")
GRANULE = 4096

every_kernel = pytest.mark.parametrize("kernel", available(), indirect=True)
pytestmark = pytest.mark.usefixtures("kernel")


def granule_scale(payload: torch.Tensor, blocks: int) -> float:
    """The fp32 scale behind the codes of a payload of one granule."""
    return payload[9 * blocks : 9 * blocks + 4].clone().view(torch.float32).item()


@every_kernel
def test_the_bytes_of_a_block() -> None:
    """The block with the largest element has the largest e4m3 as scale, and the scale of the granule divides by it."""
    x = torch.cat([E2M1, -E2M1])
    payload = encode("nvfp4", x)
    assert payload.numel() == 16  # 1 + 8 + 4, padded
    assert payload[0] == 0x7E  # 448
    assert payload[1:9].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert granule_scale(payload, 1) == torch.tensor(6.0).div(2688).item()
    assert torch.allclose(decode("nvfp4", payload, 16), x, rtol=2**-20)


@every_kernel
def test_each_block_has_a_scale_in_e4m3() -> None:
    """Of blocks whose largest elements are powers of two, all scales are exact."""
    sizes = 2.0 ** -torch.arange(9.0)
    x = (E2M1.repeat(2) * 448 * sizes[:, None]).view(-1)
    payload = encode("nvfp4", x)
    expected = (448 * sizes).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(payload[:9], expected)
    assert granule_scale(payload, 9) == 1.0
    assert torch.equal(decode("nvfp4", payload, x.numel()), x)


@every_kernel
def test_elements_round_to_nearest_even_and_saturate() -> None:
    inputs = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.3, 5.1])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.5, 6.0])
    scale = 18.0  # an e4m3; the first block makes the scale of the granule 1
    for sign in (1.0, -1.0):
        block = torch.zeros(16)
        block[:9], block[9] = sign * scale * inputs, 6 * scale
        x = torch.cat([torch.full((16,), 6 * 448.0), block])
        decoded = decode("nvfp4", encode("nvfp4", x), 32)
        assert torch.equal(decoded[16:25], sign * scale * expected)
        # 1.06 times the largest element: the nearest scale is the same, and the element saturates.
        x[16 + 9] = 6 * scale * 1.05
        assert decode("nvfp4", encode("nvfp4", x), 32)[25] == 6 * scale


@every_kernel
def test_blocks_that_are_not_finite_affect_only_themselves() -> None:
    for bad in (NAN, INF, -INF):
        x = floats("normal", 3 * 16)
        expected = decode("nvfp4", encode("nvfp4", torch.cat([x[:16], torch.zeros(16), x[32:]])), 48)
        x[20] = bad
        payload = encode("nvfp4", x)
        assert payload[1] == 0x7F and not payload[3 + 8 : 3 + 16].any()
        decoded = decode("nvfp4", payload, 48)
        assert (decoded[16:32].view(torch.int32) == 0x7FC00000).all()
        kept = torch.arange(48) // 16 != 1
        assert torch.equal(decoded[kept], expected[kept])


@every_kernel
@pytest.mark.parametrize("size", [3.4e38, 1e38, 1.0, 1e-30, 1e-34, 1e-36, 1e-38, 1e-45, 0.0])
def test_every_range_decodes_to_finite_numbers(size: float) -> None:
    x = floats("normal", 5000).clamp(-1, 1) * torch.tensor(size)
    decoded = decode("nvfp4", encode("nvfp4", x), 5000)
    assert decoded.isfinite().all()
    if size >= 1e-33:
        assert ((decoded - x).double().norm() / x.double().norm()) < 0.12
    elif size <= 1e-36:
        assert not decoded.any()


@every_kernel
def test_any_payload_can_be_decoded() -> None:
    """Scales of either sign, of NaN and of every exponent: numbers by the formula, and the one NaN."""
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = torch.tensor([i % 16 | i * 7 % 16 << 4 for i in range(2048)], dtype=torch.int32).to(torch.uint8)
    for own in (1.0, -0.3, 1e-44, 3e38, INF, NAN, 0.0):
        field = torch.tensor([own]).view(torch.uint8)
        payload = torch.cat([scales, codes, field, torch.zeros(12, dtype=torch.uint8)])
        block = scales.view(torch.float8_e4m3fn).float() * torch.tensor(own)
        block[~block.isfinite()] = NAN
        table = torch.cat([E2M1, -E2M1])
        values = table[torch.stack([codes & 15, codes >> 4], 1).view(-1).long()]
        expected = values * block.repeat_interleave(16)
        decoded = decode("nvfp4", payload, GRANULE)
        nan = expected.isnan()
        assert torch.equal(decoded[~nan].view(torch.int32), expected[~nan].view(torch.int32))
        assert (decoded.view(torch.int32)[nan] == 0x7FC00000).all()
        total = reduce("nvfp4", [payload, payload], GRANULE)
        assert torch.equal(total.nan_to_num(1.5), (decoded + decoded).nan_to_num(1.5))


def test_the_error_of_a_granule_does_not_depend_on_other_granules() -> None:
    """An outlier costs the range of its own 4096 elements only."""
    x = floats("normal", 3 * GRANULE)
    alone = decode("nvfp4", encode("nvfp4", x), len(x))
    x[GRANULE + 5] = 1e20
    beside = decode("nvfp4", encode("nvfp4", x), len(x))
    assert torch.equal(beside[:GRANULE], alone[:GRANULE])
    assert torch.equal(beside[2 * GRANULE :], alone[2 * GRANULE :])


def test_the_error_is_less_than_that_of_mxfp4() -> None:
    for kind in ("normal", "offset"):
        x = floats(kind, 4 * GRANULE)
        errors = {
            spec: float((decode(spec, encode(spec, x), len(x)) - x).norm()) for spec in ("nvfp4", "mxfp4")
        }
        assert errors["nvfp4"] < 0.9 * errors["mxfp4"], kind


def test_defaults() -> None:
    assert parse("nvfp4") == Nvfp4() and str(Nvfp4()) == "nvfp4"
    assert parse("nvfp4").wire_bytes(GRANULE) == 256 + 2048 + 16 and parse("nvfp4").granularity == GRANULE
    assert math.isclose(8 * parse("nvfp4").wire_bytes(GRANULE) / GRANULE, 4.53125)
    with pytest.raises(ValueError, match="it takes no options"):
        parse("nvfp4:block=32")
    with pytest.raises(ValueError, match="element: expected e2m1, got e4m3"):
        Nvfp4(element="e4m3")
