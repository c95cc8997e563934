"""Stochastic rounding: unbiased, and a function of key and index only."""

from __future__ import annotations

import pytest
import torch

from dtcomm import _C
from dtcomm.codecs import Integer
from dtcomm.codecs import codec as parse
from dtcomm.kernels import available, counter_rng, reference, use
from dtcomm.kernels.ops import decode, encode
from dtcomm.kernels.reference import integer
from tests.unit.codecs.cases import codecs_with_option_sets
from tests.unit.kernels.inputs import floats

BF16 = "bf16:round=stochastic"
STOCHASTIC = [
    codec for codec in codecs_with_option_sets() if isinstance(codec, Integer) and codec.round == "stochastic"
]


def variance_and_step(codec: Integer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variance of every decoded element, and the distance of the two values that it rounds to."""
    domain = reference.rotate(codec, x.numpy()) if reference.rotates(codec) else x.numpy()
    coded, _ = integer.take_outliers(codec, domain, 0, 0) if codec.spikes else (domain, None)
    fields, _ = integer.encode_blocks(codec, coded, 0, 0)
    step, *zero = (torch.from_numpy(field).double().repeat_interleave(codec.block) for field in fields)
    t = (torch.from_numpy(coded) - (zero[0] if zero else 0)) / step
    if codec.spikes:
        is_outlier = torch.from_numpy(domain != coded)
        value = torch.from_numpy(domain).double()
        spacing = (
            2.0 ** (value.abs().log2().floor() - 7) if codec.scale == "bf16" else torch.full_like(value, 1e-9)
        )
        step, t = torch.where(is_outlier, spacing, step), torch.where(is_outlier, value / spacing, t)
    fraction = t - t.floor()
    variance = fraction * (1 - fraction) * step**2
    if reference.rotates(codec):  # an element is a sum over its block, every term times 1 / sqrt(block)
        rows = variance.view(-1, codec.block)
        variance = rows.mean(1).repeat_interleave(codec.block)
        step = step.view(-1, codec.block).amax(1).repeat_interleave(codec.block)
    return variance, step


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_stochastic_rounding_is_unbiased(codec: Integer) -> None:
    """Means over keys lie within five standard errors of x, of each element and, sharper, of all together."""
    n, keys = 4096, 300
    x = floats("normal", n, seed=1) + 0.3
    mean = torch.zeros(n, dtype=torch.float64)
    for key in range(keys):
        mean += decode(codec, encode(codec, x, key=_C.mix_key(1, 0, key)), n).double() / keys
    variance, step = variance_and_step(codec, x)
    variance = variance / keys
    error = mean - x.double()
    # A landing that is expected less than once in all keys is not normally distributed: allow for a few.
    assert (error.abs() <= 5 * variance.sqrt() + 4 * step / keys).all()
    assert error.sum().abs() < 5 * variance.sum().sqrt()


def test_bf16_rounded_at_random_is_unbiased_and_one_of_the_two_neighbours() -> None:
    n, keys = 4096, 400
    x = floats("normal", n, seed=2) + 0.3
    bits = x.view(torch.int32)
    low = (bits & -0x10000).view(torch.float32).double()  # the neighbour nearer to zero
    high = ((bits & -0x10000) + 0x10000).view(torch.float32).double()
    up = torch.zeros(n, dtype=torch.float64)
    for key in range(keys):
        y = decode(BF16, encode(BF16, x, key=_C.mix_key(1, 0, key)), n).double()
        assert torch.equal(torch.where(y == low, low, high), y)
        up += (y != low).double() / keys
    share = (bits & 0xFFFF).double() / 65536
    deviation = (share * (1 - share) / keys).sqrt()
    assert ((up - share).abs() <= 5 * deviation + 4 / keys).all()
    assert (up - share).sum().abs() < 5 * deviation.square().sum().sqrt()


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("start", [0, 12345, 2**32 - 2048 - 17, 2**40 - 1000])
def test_bf16_in_parts_and_special_numbers_are_the_same_in_every_kernel(name: str, start: int) -> None:
    """Also if the index passes 2^32, and from places that are no multiples of a vector."""
    x = floats("normal", 5000)
    x[::7] = float("nan")
    x[1:8] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, 0.0, -0.0, 1e-40])
    with use("reference"):
        expected = encode(BF16, x, key=9, offset=start)
    with use(name):
        assert torch.equal(encode(BF16, x, key=9, offset=start), expected)
        part = encode(BF16, x[1024:3072], key=9, offset=start + 1024)
        assert torch.equal(part, expected[2048:6144])


def test_bf16_rounded_at_random_keeps_what_bf16_has() -> None:
    x = floats("normal", 3000).bfloat16()
    assert torch.equal(decode(BF16, encode(BF16, x, key=5), 3000, dtype=torch.bfloat16), x)


def test_bf16_rounded_at_random_sums_alone() -> None:
    assert parse("bf16:round=stochastic").operations == ("sum",)
    assert parse("bf16").operations == ("sum", "min", "max")
    with pytest.raises(ValueError, match="bf16: option 'round' is up; valid: nearest"):
        parse("bf16:round=up")


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("start", [0, 12345, 2**32 - 2048 - 16, 2**40 - 1000])
def test_encoding_in_parts_gives_the_same_bytes(name: str, start: int) -> None:
    """Also if the index passes 2^32 within a block."""
    n = 6 * 1024
    x = floats("normal", n)
    with use(name):
        whole = encode("int8:round=stochastic", x, key=3, offset=start)
        for size in (1024, 2048):
            parts = [
                encode("int8:round=stochastic", x[at : at + size], key=3, offset=start + at)
                for at in range(0, n, size)
            ]
            assert torch.equal(torch.cat(parts), whole)
    with use("reference"):
        assert torch.equal(encode("int8:round=stochastic", x, key=3, offset=start), whole)


def test_keys_and_offsets_give_different_bytes() -> None:
    x = torch.full((4096,), 0.3)
    x[::32] = 127.0
    payloads = {
        bytes(encode("int8:round=stochastic", x, key, offset).numpy())
        for key in (0, 1, 2, 1 << 32, 1 << 63)
        for offset in (0, 1, 4096, 1 << 32, 1 << 33)
    }
    assert len(payloads) == 25


@pytest.mark.parametrize("bit", range(0, 64, 7))
def test_streams_of_adjacent_keys_are_uncorrelated(bit: int) -> None:
    """Correlation of two streams, and of one with itself shifted, within five standard errors of zero."""
    n = 1 << 16
    a = torch.from_numpy(counter_rng.uniform(12345, 0, n)).double() - 0.5
    b = torch.from_numpy(counter_rng.uniform(12345 ^ 1 << bit, 0, n)).double() - 0.5
    for left, right in ((a, b), (a[1:], a[:-1]), (a[32:], a[:-32]), (b[1024:], a[:-1024])):
        correlation = (left * right).mean() * 12
        assert abs(correlation) < 5 / n**0.5
    assert abs(a.mean()) < 5 / (12 * n) ** 0.5 and 0 <= (a + 0.5).min() and (a + 0.5).max() < 1


def test_ranks_round_independently() -> None:
    """Rounding errors of ranks must not add up: the error of the mean of 64 ranks is 8 times smaller."""
    x = floats("normal", 2048)
    codec = "int8:round=stochastic"
    errors = [decode(codec, encode(codec, x, key=_C.mix_key(7, rank, 0)), 2048) - x for rank in range(64)]
    error_of_one = torch.stack(errors).square().mean().sqrt()
    error_of_mean = torch.stack(errors).mean(0).square().mean().sqrt()
    assert 6.5 < error_of_one / error_of_mean < 9.5


def test_python_and_cpp_mix_keys_alike() -> None:
    words = [(0, 0, 0), (1, 2, 3), (2**64 - 1, 2**32 - 1, 2**32 - 1), (5, 0, 1), (5, 1, 0)]
    keys = [_C.mix_key(*triple) for triple in words]
    assert keys == [counter_rng.mix_key(*triple) for triple in words] and len(set(keys)) == len(words)
