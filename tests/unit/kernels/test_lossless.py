"""The lossless codec: every bit comes back, sizes by hand, the same bytes from every kernel, damaged payloads."""

from __future__ import annotations

import math
import struct

import pytest
import torch

import dtcomm
from dtcomm.codecs import Lossless, names
from dtcomm.codecs import codec as parse
from dtcomm.errors import PayloadCorrupt
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, quantize, reduce, reduce_encode

DTYPES = (torch.bfloat16, torch.float32)
SIZES = (1, 7, 8, 9, 31, 63, 64, 65, 1000, 4095, 4096, 4097, 4100, 12_345)
INTEGER = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def random_bits(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64).to(INTEGER[dtype]).view(dtype)


def inputs(n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors that need every width and mode: exponents that are one, two, few, many, all, and those of NaN and Inf."""
    normal = torch.randn(n)
    one = torch.rand(n) + 1
    few = torch.where(torch.rand(n) < 0.02, normal * 1e20, normal)
    special = torch.where(torch.rand(n) < 0.03, torch.tensor([math.nan]), torch.randn(n))
    special = torch.where(torch.rand(n) < 0.03, torch.tensor([-math.inf]), special)
    floats = {
        "zeros": torch.zeros(n),
        "negative zeros": -torch.zeros(n),
        "one exponent": one,
        "two exponents": one * torch.randint(1, 3, (n,)),
        "normal": normal,
        "outliers": few,
        "special": special,
        "subnormal": normal * 1e-39,
        "sparse": normal * (torch.rand(n) < 0.05),
        "many exponents": torch.ldexp(normal, torch.randint(-100, 100, (n,))),
    }
    return {name: x.to(dtype) for name, x in floats.items()} | {"random bits": random_bits(n, dtype)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_every_kernel_writes_the_reference_bytes_and_returns_every_bit(n: int, dtype: torch.dtype) -> None:
    for kind, x in inputs(n, dtype).items():
        with use("reference"):
            expected = encode("lossless", x)
        assert expected.numel() <= parse("lossless").wire_bytes(n, dtype)
        for kernel in available():
            with use(kernel):
                assert torch.equal(encode("lossless", x), expected), (kernel, kind)
                assert same_bits(decode("lossless", expected, n, dtype), x), (kernel, kind)


def test_the_bytes_of_a_small_tensor() -> None:
    """1, 1.5, -2 and 2^-30 in bf16: base 128, codes of two bits, and one exponent that is stored apart."""
    x = torch.tensor([1.0, 1.5, -2.0, 2.0**-30] * 6, dtype=torch.bfloat16)
    payload = encode("lossless", x)
    signs = bytes([0x00, 0x40, 0x80, 0x00]) * 6
    # Codes 1, 1, 0, 3: the lowest bits are 1, 1, 0, 1 and the next ones 0, 0, 0, 1.
    planes = bytes([0xBB] * 3) + bytes([0x88] * 3)
    body = struct.pack("<BBH", 2, 128, 6) + signs + planes + bytes([97]) * 6
    assert len(body) < 2 * len(x)
    assert payload.numpy().tobytes() == struct.pack("<QBB6x", 16 + len(body), 1, 2) + body


def test_a_payload_that_would_not_shrink_holds_the_elements() -> None:
    for dtype in DTYPES:
        x = random_bits(5000, dtype)
        payload = encode("lossless", x)
        assert payload.numel() == 16 + 5000 * dtype.itemsize == parse("lossless").wire_bytes(5000, dtype)
        assert same_bits(payload[16:].view(dtype), x)


def test_weights_take_a_quarter_less() -> None:
    """The weights of layers of several widths, as they are initialized, in bf16; fp32 has 16 more bits that stay."""
    layers = [torch.nn.Linear(width, 64) for width in (64, 256, 1024)]
    x = torch.cat([torch.nn.init.normal_(layer.weight, std=0.02).detach().view(-1) for layer in layers])
    assert encode("lossless", x.bfloat16()).numel() < 0.72 * 2 * x.numel()
    assert encode("lossless", x).numel() < 0.87 * 4 * x.numel()


def test_results_go_to_the_given_memory() -> None:
    x = torch.randn(33, 21).bfloat16()
    codec = parse("lossless")
    memory, seen = torch.empty(codec.wire_bytes(x.numel(), x.dtype), dtype=torch.uint8), torch.empty_like(x)
    payload = encode(codec, x, out=memory, decoded=seen)
    assert payload.data_ptr() == memory.data_ptr() and torch.equal(payload, encode(codec, x))
    assert same_bits(seen, x)
    out = torch.empty_like(x)
    assert decode(codec, payload, x.numel(), x.dtype, out=out) is out and same_bits(out, x)
    assert same_bits(quantize(codec, x), x)


def test_a_payload_owns_its_memory() -> None:
    """torch.save stores all of the memory that a tensor has a part of."""
    payload = encode("lossless", torch.randn(10_000).bfloat16())
    assert payload.untyped_storage().nbytes() == payload.numel()


def test_no_elements_have_no_payload() -> None:
    for kernel in ("reference", available()[0]):
        with use(kernel):
            assert encode("lossless", torch.empty(0)).numel() == 0
            assert decode("lossless", torch.empty(0, dtype=torch.uint8), 0).numel() == 0


@pytest.mark.parametrize("kernel", available())
def test_damaged_payloads_are_refused_or_decode_to_something(kernel: str) -> None:
    """Whatever the bytes are: PayloadCorrupt, or a tensor, and nothing else."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4500, generator=generator).bfloat16()
    payload = encode("lossless", x)
    with use(kernel):
        for what, damage in {
            "length": payload[:-1],
            "head": payload[:9],
            "granule": torch.cat([payload, payload.new_zeros(3)]),
        }.items():
            with pytest.raises(PayloadCorrupt, match="lossless"):
                decode("lossless", damage, 4500, torch.bfloat16)
            assert what
        for at, value in ((8, 2), (9, 4), (16, 5), (18, 255)):
            damaged = payload.clone()
            damaged[at] = value
            with pytest.raises(PayloadCorrupt):
                decode("lossless", damaged, 4500, torch.bfloat16)
        refused = 0
        for _ in range(300):
            damaged = payload.clone()
            at = int(torch.randint(16, payload.numel(), (), generator=generator))
            damaged[at] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
            try:
                assert decode("lossless", damaged, 4500, torch.bfloat16).numel() == 4500
            except PayloadCorrupt:
                refused += 1
        assert 0 < refused < 300  # damage of a sign or a mantissa is not seen


def test_wrong_sizes_and_types() -> None:
    x = torch.randn(100)
    payload = encode("lossless", x)
    with pytest.raises(PayloadCorrupt, match="another size"):
        decode("lossless", encode("lossless", x.bfloat16()), 100, torch.float32)
    with pytest.raises(ValueError, match="at most 36 bytes"):
        decode("lossless", payload, 10, torch.bfloat16)
    with pytest.raises(
        TypeError, match=r"x: codec 'lossless' does not take torch.float16; valid: float32, bfloat16"
    ):
        encode("lossless", x.half())
    with pytest.raises(ValueError, match="residual: codec 'lossless' loses nothing"):
        encode("lossless", x, residual=torch.zeros(100))
    with pytest.raises(ValueError, match="out: 100 elements"):
        encode("lossless", x, out=torch.empty(10, dtype=torch.uint8))


def test_sums_are_refused_with_the_reason() -> None:
    payload = encode("lossless", torch.randn(64))
    for function in (reduce, reduce_encode):
        with pytest.raises(ValueError, match="has no sums: the length of its payloads depends on the data"):
            function("lossless", [payload, payload], 64)


def test_the_spec() -> None:
    assert parse("lossless") == Lossless() and str(Lossless()) == "lossless"
    assert Lossless().variable_length and not parse("int8").variable_length
    assert "lossless" not in names()  # of the codecs that every function takes
    with pytest.raises(ValueError, match="it takes no options"):
        parse("lossless:bits=3")
    with pytest.raises(ValueError, match="did you mean 'lossless'"):
        parse("losless")
    with pytest.raises(TypeError, match="no layout"):
        Lossless().layout()
    with pytest.raises(ValueError, match="'lossless' is taken"):
        dtcomm.codecs.custom("lossless", lambda x: x, lambda x, n: x, lambda n: n)
