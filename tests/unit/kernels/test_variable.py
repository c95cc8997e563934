"""Codec intv: bytes computed by hand, widths and their budget, blocks that are not finite, any payload, the gain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtcomm.codecs import VariableInteger
from dtcomm.codecs import codec as parse
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.kernels.inputs import KINDS, floats

NAN, INF = float("nan"), float("inf")
GRANULE = 4096

every_kernel = pytest.mark.parametrize("kernel", available(), indirect=True)


def widths_of(codec: VariableInteger, payload: torch.Tensor, n: int) -> list[int]:
    """The widths of the blocks of a payload of one granule, by the formula of docs/reference/wire-format.md."""
    blocks, per_granule = -(-n // codec.block), GRANULE // codec.block
    level = int(payload[-4]) + 256 * int(payload[-3])
    widths = []
    for b, field in enumerate((payload[:blocks] % 128).tolist()):
        width = min((field * per_granule + b + 64 * per_granule - level) // (8 * per_granule), 8)
        widths.append(0 if field in (0, 127) else max(width, 0))
    return widths


def budget_of(codec: VariableInteger, n: int) -> int:
    return (codec.wire_bytes(n) - -(-n // codec.block) - 4) * 8 // codec.block


@every_kernel
@pytest.mark.usefixtures("kernel")
def test_the_bytes_of_a_block() -> None:
    """One block of 16 has 11 bytes for codes, 5 bits each; the largest element, 16, becomes -16 steps of -1."""
    x = torch.tensor([16.0, -15.0, 14.5, 1.0, -1.0, 0.0, -0.0, 0.5, -0.5, 1.5, 3, 4, 5, 6, 7, 8])
    payload = encode("intv:block=16", x)
    assert payload.numel() == 16
    codes = [-16, 15, -14, -1, 1, 0, 0, 0, 0, -2, -3, -4, -5, -6, -7, -8]
    low = [code & 15 for code in codes]
    assert payload[0] == 126 + 128  # the largest field, with the sign of the step
    assert payload[1:9].tolist() == [low[i] | low[i + 1] << 4 for i in range(0, 16, 2)]
    high = sum((code >> 4 & 1) << i for i, code in enumerate(codes))
    assert payload[9] + 256 * payload[10].int() == high
    assert not payload[11]
    scale = int(torch.tensor(16.0).view(torch.int32)) >> 20
    assert int(payload[14:16].clone().view(torch.int16)) == scale - 126
    assert widths_of(parse("intv:block=16"), payload, 16) == [5]  # type: ignore[arg-type]
    expected = torch.tensor([-float(code) for code in codes]) + 0.0
    assert torch.equal(decode("intv:block=16", payload, 16).view(torch.int32), expected.view(torch.int32))


@every_kernel
@pytest.mark.usefixtures("kernel")
def test_a_width_grows_by_one_where_a_scale_doubles() -> None:
    """The steps of all blocks are nearly equal, however different the blocks are."""
    codec = VariableInteger()
    sizes = 2.0 ** (torch.arange(128) % 7)
    x = (floats("normal", GRANULE).view(128, 32).clamp(-1, 1) * sizes[:, None]).view(-1)
    x[::32] = sizes
    widths = widths_of(codec, encode(codec, x), GRANULE)
    assert sum(widths) == budget_of(codec, GRANULE) == 128 * 5 - 1
    for exponent in range(7):
        assert set(widths[exponent::7]) <= {exponent + 2, exponent + 3}


@settings(max_examples=100, deadline=None)
@given(
    mean=st.integers(2, 7),
    block=st.sampled_from([16, 32, 128, 1024, 4096]),
    kind=st.sampled_from(sorted(KINDS)),
    n=st.integers(1, 200) | st.integers(1, 2 * GRANULE),
    seed=st.integers(0, 1000),
)
def test_kernels_write_the_bytes_of_the_reference(
    mean: int, block: int, kind: str, n: int, seed: int
) -> None:
    """And keep to the budget; elements of a finite block are off by a step at most."""
    codec, x = VariableInteger(width=mean, block=block), floats(kind, n, seed)
    payloads, decoded, residuals = {}, {}, {}
    for name in available():
        residual = torch.zeros(n)
        with use(name):
            payloads[name] = encode(codec, x)
            decoded[name] = decode(codec, payloads[name], n)
            assert torch.equal(encode(codec, x, residual=residual), payloads[name])
        residuals[name] = residual
    for name in available():
        assert torch.equal(payloads[name], payloads["reference"]), name
        for other in (decoded, residuals):
            assert torch.equal(other[name].view(torch.int32), other["reference"].view(torch.int32)), name
    for at in range(0, n, GRANULE):
        m = min(GRANULE, n - at)
        part = payloads["reference"][codec.wire_bytes(at) : codec.wire_bytes(at + m)]
        widths, budget = widths_of(codec, part, m), budget_of(codec, m)
        assert sum(widths) <= budget
        top = np.pad(x[at : at + m].abs().numpy(), (0, -m % block)).reshape(-1, block).max(axis=1)
        error = (decoded["reference"] - x)[at : at + m].abs().numpy()
        error = np.pad(error, (0, -m % block)).reshape(-1, block).max(axis=1)
        for b, width in enumerate(widths):
            if not np.isfinite(top[b]):
                assert np.isnan(error[b])
            elif width and top[b] < 3e38:
                assert error[b] <= top[b] * 1.125 * 2.0 ** (1 - width)
            elif not width:
                assert error[b] == top[b]


@every_kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("numel", [100, GRANULE, GRANULE + 500])
def test_any_payload_is_decoded_alike(numel: int) -> None:
    """Widths over the budget, scales of Inf and NaN: all kernels read the same numbers, and add them."""
    generator = np.random.default_rng(numel)
    size = parse("intv").wire_bytes(numel)
    for _ in range(10):
        payload = torch.from_numpy(generator.integers(0, 256, size, dtype=np.uint8))
        payload[-4:] = torch.from_numpy(generator.integers(0, [256, 8, 256, 8], dtype=np.uint8))
        decoded = decode("intv", payload, numel)
        with use("reference"):
            expected = decode("intv", payload, numel)
        assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))
        total = reduce("intv", [payload, payload], numel)
        assert torch.equal(total.nan_to_num(1.5), (decoded + decoded).nan_to_num(1.5))


@every_kernel
@pytest.mark.usefixtures("kernel")
def test_blocks_that_are_not_finite_affect_no_other_block() -> None:
    for bad in (NAN, INF, -INF):
        x = floats("normal", 4 * 32)
        x[40] = bad
        payload = encode("intv", x)
        assert payload[1] == 127
        decoded = decode("intv", payload, 128)
        assert (decoded[32:64].view(torch.int32) == 0x7FC00000).all()
        others = torch.arange(128) // 32 != 1
        assert ((decoded - x)[others].abs() < 0.1).all()


@pytest.mark.parametrize("size", [3.4e38, 1e38, 1.0, 1e-30, 1e-34, 1e-36, 1e-38, 1e-45, 0.0])
def test_every_range_decodes_to_finite_numbers(size: float) -> None:
    x = floats("normal", 5000).clamp(-1, 1) * torch.tensor(size)
    decoded = decode("intv", encode("intv", x), 5000)
    assert decoded.isfinite().all()
    if size >= 1e-34:  # scales end at 1.875 * 2^127, so that the largest numbers saturate
        relative = (decoded - x).double().norm() / x.double().norm()
        assert relative < (0.1 if size > 3.1e38 else 0.05)
    elif size <= 1e-36:
        assert not decoded.any()


def test_zeros_stay_zero_beside_other_elements() -> None:
    x = floats("normal", GRANULE)
    x[::3] = 0.0
    x[1::3] = x[1::3].abs().neg()
    decoded = decode("intv", encode("intv", x), GRANULE)
    assert not decoded[::3].view(torch.int32).any()


def test_sums_are_those_of_the_decoded_payloads() -> None:
    payloads = [encode("intv", floats("normal", 5000, seed)) for seed in range(3)]
    local = floats("normal", 5000, 7)
    expected = local.clone()
    for payload in payloads:
        expected += decode("intv", payload, 5000)
    assert torch.equal(reduce("intv", payloads, 5000, local, position=0), expected)
    wire = reduce_encode("intv", payloads, 5000, local, position=0)
    assert torch.equal(wire, encode("intv", expected))


def test_blocks_of_different_energy_have_a_fraction_of_the_error_of_fixed_widths() -> None:
    """Where the deviations of blocks spread by an octave (one standard deviation), at 5.25 bits against int5's 5.5."""
    scales = torch.exp2(floats("normal", 512, 1)).repeat_interleave(32)
    x = floats("normal", 512 * 32) * scales

    def vnmse(spec: str) -> float:
        return float((decode(spec, encode(spec, x), len(x)) - x).square().sum() / x.square().sum())

    assert vnmse("intv") < 0.5 * vnmse("int5")


def test_defaults() -> None:
    assert parse("intv") == VariableInteger()
    assert str(VariableInteger(width=4, block=64)) == "intv:width=4,block=64"
    assert parse("intv").wire_bytes(GRANULE) == 128 + 2560 and parse("intv").granularity == GRANULE
    with pytest.raises(ValueError, match=r"intv: option 'width' is 8; valid: 2, 3, 4, 5, 6, 7"):
        parse("intv:width=8")
    with pytest.raises(ValueError, match="intv: option 'block' is 24"):
        parse("intv:block=24")
