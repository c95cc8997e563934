"""Codec sign: the mean in its fixed order of sums, the bits, and error feedback."""

from __future__ import annotations

import math

import pytest
import torch

from dtcomm.codecs import Sign
from dtcomm.codecs import codec as parse
from dtcomm.kernels import available
from dtcomm.kernels.ops import decode, encode
from tests.unit.codecs.cases import codecs_with_option_sets
from tests.unit.kernels.inputs import floats

SIGNS = [codec for codec in codecs_with_option_sets() if isinstance(codec, Sign) and codec.rotate == "none"]
NAN, INF = float("nan"), float("inf")


every_kernel = pytest.mark.parametrize("kernel", available(), indirect=True)
pytestmark = pytest.mark.usefixtures("kernel")


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of fp32 scalars, halves folded onto each other, written as a recursion from the top."""
    if len(parts) == 1:
        return parts[0]
    even, odd = tree_sum(parts[0::2]), tree_sum(parts[1::2])
    return even + odd


@every_kernel
@pytest.mark.parametrize("block", [16, 64, 256, 4096])
@pytest.mark.parametrize("missing", [0, 1, 9])
def test_the_mean_is_taken_in_the_fixed_order(block: int, missing: int) -> None:
    x = floats("normal", block - missing, seed=block) ** 3
    codec = f"sign:block={block},scale=fp32"
    scale = encode(codec, x)[:4].view(torch.float32)
    parts = [value.abs() / block for value in x] + [torch.tensor(0.0)] * missing
    expected = tree_sum(parts)
    if missing:
        expected = expected / torch.tensor((block - missing) / block)
    assert scale.item() == expected.item()
    assert math.isclose(scale.item(), x.double().abs().mean().item(), rel_tol=2**-20)


@every_kernel
def test_signs_are_packed_into_bits() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, 5.0, -5.0, -1e-45, 1e-45] + [-2.0] * 8 + [3.0, -3.0])
    payload = encode("sign:block=16,scale=fp32", x)
    assert payload[8:12].tolist() == [0b01101010, 0xFF, 0b10, 0]
    assert payload[4:8].view(torch.float32).item() == 3.0
    decoded = decode("sign:block=16,scale=fp32", payload, 18)
    assert torch.equal(decoded.signbit(), x.signbit()) and decoded[16:].tolist() == [3.0, -3.0]


@pytest.mark.parametrize("codec", SIGNS, ids=str)
def test_magnitudes_are_the_mean(codec: Sign) -> None:
    x = floats("normal", 3 * codec.block)
    y = decode(codec, encode(codec, x), x.numel())
    mean = x.view(3, -1).abs().mean(1, keepdim=True).expand(3, codec.block).reshape(-1)
    assert torch.allclose(y, torch.copysign(mean, x), rtol=2**-8, atol=0)


@pytest.mark.parametrize("codec", SIGNS, ids=str)
def test_nan_and_inf_affect_only_their_block(codec: Sign) -> None:
    for bad in (NAN, -NAN, INF, -INF):
        x = -floats("normal", 4 * codec.block).abs()
        x[codec.block + 3] = bad
        payload = encode(codec, x)
        y = decode(codec, payload, x.numel()).view(4, codec.block)
        assert (y[1].view(torch.int32) == 0x7FC00000).all() and (y[[0, 2, 3]] < 0).all()


@every_kernel
@pytest.mark.parametrize("codec", SIGNS, ids=str)
def test_sums_do_not_overflow(codec: Sign) -> None:
    """Nor does a block that is cut, whose sum is divided by its share."""
    largest = 3.4028234663852886e38
    for n in (codec.block, codec.block - 3):
        y = decode(codec, encode(codec, torch.full((n,), -largest)), n)
        assert y.isfinite().all() and (y <= -largest * (1 - 2**-7)).all()


@every_kernel
def test_blocks_too_small_for_a_scale_encode_to_zero_bytes() -> None:
    assert not encode("sign", torch.full((256,), -1e-39)).any()


@every_kernel
@pytest.mark.parametrize("scale", [1.5, -2.0, 1e-40, 0.0, INF, -INF, NAN])
def test_any_scale_decodes(scale: float) -> None:
    raw = torch.arange(32, dtype=torch.uint8)
    payload = torch.cat([torch.tensor([scale]).view(torch.uint8), raw, torch.zeros(12, dtype=torch.uint8)])
    decoded = decode("sign:scale=fp32", payload, 256)
    bits = (raw[:, None] >> torch.arange(8, dtype=torch.uint8)).reshape(-1) & 1
    if math.isnan(scale):
        assert (decoded.view(torch.int32) == 0x7FC00000).all()
    else:
        expected = torch.where(bits == 1, -torch.tensor(scale), torch.tensor(scale))
        assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))


def test_the_mean_under_feedback_approaches_the_gradient() -> None:
    """The mean of what is sent under a constant gradient approaches the gradient, where without memory it stays
    plus or minus the block's mean."""
    x = floats("normal", 512, seed=3)
    residual, sent, steps = torch.zeros(512), torch.zeros(512), 200
    for _ in range(steps):
        sent += decode("sign", encode("sign", x, residual=residual), 512)
    with_memory = (sent / steps - x).norm() / x.norm()
    without = (decode("sign", encode("sign", x), 512) - x).norm() / x.norm()
    assert with_memory < 0.1 < 0.5 < without


def test_defaults_and_sizes() -> None:
    assert parse("sign") == Sign(block=256, scale="bf16")
    assert parse("sign").wire_bytes(1024) == 144  # 4 scales of 2 bytes, 128 bytes of bits, padded


@pytest.mark.parametrize("spec", ["sign:round=stochastic", "sign:block=8", "sign:scale=fp16"])
def test_wrong_options_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="option"):
        parse(spec)
