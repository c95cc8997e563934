"""Deltas of weights: every bit comes back, every kernel writes the same bytes, damaged payloads change nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtcomm.errors import PayloadCorrupt
from dtcomm.extensions.weights.codec import decode
from dtcomm.extensions.weights.codec import encode as encode_and_count
from dtcomm.kernels import available, use

INTEGER = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.uint8: torch.uint8,
    torch.int8: torch.uint8,
}
DTYPES = tuple(INTEGER)
SIZES = (0, 1, 2, 63, 64, 65, 1000, 65_535, 65_536, 65_537, 200_001)
CHANGES = ("none", "one", "last", "steps", "many", "random bits", "tail")
KERNELS = tuple(name for name in available() if name != "reference")


def encode(old: torch.Tensor, new: torch.Tensor, *, threads: int = 0) -> torch.Tensor:
    payload, changed = encode_and_count(old, new, threads=threads)
    assert changed == int((bits_of(old) != bits_of(new)).sum())
    return payload


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGER[tensor.dtype])


def random_bits(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2**31, (n,)).to(INTEGER[dtype]).view(dtype)


def weights(n: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype in (torch.uint8, torch.int8):
        return random_bits(n, dtype)
    return (torch.randn(n) * 0.02).to(dtype)


def changed(old: torch.Tensor, how: str) -> torch.Tensor:
    """A copy of `old` with changes of one kind."""
    new, n = bits_of(old).clone(), old.numel()
    if n == 0 or how == "none":
        return new.view(old.dtype)
    if how == "random bits":
        return random_bits(n, old.dtype)
    if how in ("one", "last"):
        new[-1 if how == "last" else n // 2] ^= 1
    elif how == "tail":
        new[n - n // 7 - 1 :] = bits_of(random_bits(n // 7 + 1, old.dtype))
    else:
        share = 0.03 if how == "steps" else 0.6
        step = torch.where(torch.rand(n) < 0.9, 1, torch.randint(2, 6, (n,)))
        step = torch.where(torch.rand(n) < 0.5, -step, step) * (torch.rand(n) < share)
        new += step.to(new.dtype)
    return new.view(old.dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits_of(a), bits_of(b))


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_comes_back_with_every_kernel(dtype: torch.dtype, how: str) -> None:
    torch.manual_seed(0)
    for n in SIZES:
        old = weights(n, dtype)
        new = changed(old, how)
        payloads = []
        for kernel in KERNELS:
            with use(kernel):
                payloads.append(encode(old, new, threads=2))
                out = torch.zeros_like(old)
                decode(old, payloads[-1], out, threads=2)
                assert same_bits(out, new)
                in_place = old.clone()
                decode(in_place, payloads[0], in_place, threads=1)
                assert same_bits(in_place, new)
        assert all(torch.equal(payload, payloads[0]) for payload in payloads)
        assert payloads[0].numel() <= new.nbytes * 1.001 + 57


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.binary(max_size=1200),
    flips=st.lists(st.tuples(st.integers(0, 1199), st.integers(1, 255)), max_size=40),
    dtype=st.sampled_from(DTYPES),
    kernel=st.sampled_from(KERNELS),
)
def test_any_bit_patterns(data: bytes, flips: list[tuple[int, int]], dtype: torch.dtype, kernel: str) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    before = bytearray(data[: len(data) // size * size])
    after = bytearray(before)
    for place, mask in flips:
        if after:
            after[place % len(after)] ^= mask
    if before:
        old, new = (torch.frombuffer(b, dtype=torch.uint8).clone().view(dtype) for b in (before, after))
    else:
        old = new = torch.empty(0, dtype=dtype)
    with use(kernel):
        payload = encode(old, new)
        decode(old, payload, old)
    assert same_bits(old, new)


def test_specials_of_floats() -> None:
    old = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-40, 1.0], dtype=torch.float32)
    new = torch.tensor([-0.0, 0.0, float("nan"), float("-inf"), -1e-40, 1.0], dtype=torch.float32)
    new.view(torch.int32)[2] |= 0x1234
    out = torch.empty_like(old)
    decode(old, encode(old, new), out)
    assert same_bits(out, new)


def test_smaller_than_what_others_send() -> None:
    torch.manual_seed(1)
    master = torch.randn(300_000) * 0.02
    old = master.bfloat16()
    new = (master + 1.7e-6 * torch.randn(300_000).clamp(-2, 2) / 2).bfloat16()
    count = int((bits_of(old) != bits_of(new)).sum())
    assert 0.01 < count / old.numel() < 0.05
    payload = encode(old, new)
    assert payload.numel() * 8 / count < 10


def test_unchanged_weights_take_eight_bytes_a_granule() -> None:
    old = torch.randn(65_536 * 3)
    assert encode(old, old.clone()).numel() == 48 + 3 * 8


def test_threads_do_not_change_the_bytes() -> None:
    torch.manual_seed(2)
    old = weights(3_000_000, torch.bfloat16)
    new = changed(old, "steps")
    payload = encode(old, new, threads=1)
    assert torch.equal(payload, encode(old, new, threads=3))
    decode(old, bytes(payload.numpy()), old, threads=3)
    assert same_bits(old, new)


@pytest.mark.parametrize("how", ["flip", "cut", "longer", "empty"])
def test_damaged_payloads_change_nothing(how: str) -> None:
    torch.manual_seed(3)
    old = weights(70_000, torch.bfloat16)
    payload = encode(old, changed(old, "steps"))
    kept = old.clone()
    for i in range(100):
        damaged = payload.clone()
        if how == "flip":
            damaged[int(torch.randint(0, payload.numel(), ()))] ^= 1 << i % 8
        elif how == "cut":
            damaged = damaged[: int(torch.randint(1, payload.numel(), ()))].clone()
        elif how == "longer":
            damaged = torch.cat((damaged, torch.zeros(i + 1, dtype=torch.uint8)))
        else:
            damaged = torch.empty(0, dtype=torch.uint8)
        with pytest.raises(PayloadCorrupt, match="the payload"):
            decode(old, damaged, old)
        with pytest.raises(PayloadCorrupt, match="the payload"):
            decode(old, damaged, torch.empty_like(old))
        assert same_bits(old, kept)


def test_payloads_for_other_tensors_are_refused() -> None:
    torch.manual_seed(4)
    old = weights(70_000, torch.bfloat16)
    payload = encode(old, changed(old, "steps"))
    for other in (weights(69_999, torch.bfloat16), old.view(torch.float16)):
        with pytest.raises(PayloadCorrupt, match="elements of kind"):
            decode(other, payload, other)
    far = old * 64  # all of its exponents are others
    kept = far.clone()
    with pytest.raises(PayloadCorrupt, match="other weights"):
        decode(far, payload, far)
    assert same_bits(far, kept)


def test_wrong_arguments_are_named() -> None:
    x = torch.zeros(4, 6)
    with pytest.raises(ValueError, match="old: is not contiguous"):
        encode(x.t(), x.t())
    with pytest.raises(ValueError, match="new: has shape"):
        encode(x, x[:2])
    with pytest.raises(ValueError, match="new: has dtype"):
        encode(x, x.bfloat16())
    with pytest.raises(TypeError, match=r"old: torch\.float64"):
        encode(x.double(), x.double())
    with pytest.raises(ValueError, match="threads"):
        encode(x, x, threads=-1)
    with pytest.raises(ValueError, match="out: has shape"):
        decode(x, encode(x, x), x[:2])
    with pytest.raises(ValueError, match="payload: must be"):
        decode(x, torch.zeros(3), x)


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_agrees(dtype: torch.dtype, how: str) -> None:
    torch.manual_seed(5)
    for n in (0, 1, 65, 9000):
        old = weights(n, dtype)
        new, out = changed(old, how), torch.empty_like(old)
        payload = encode(old, new)
        with use("reference"):
            assert torch.equal(encode(old, new), payload)
            decode(old, payload, out)
        assert same_bits(out, new)


def test_the_reference_refuses_what_kernels_refuse() -> None:
    torch.manual_seed(6)
    old = weights(500, torch.bfloat16)
    payload = encode(old, changed(old, "steps"))
    for place in range(payload.numel()):
        damaged = payload.clone()
        damaged[place] ^= 1 << place % 8
        for kernel in ("reference", KERNELS[0]):
            with use(kernel), pytest.raises(PayloadCorrupt, match="the payload"):
                decode(old, damaged, torch.empty_like(old))
