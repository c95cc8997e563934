"""Every kernel gives the bytes of the reference, for every codec, option, verb, type and input."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dtcomm.codecs import Codec
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.codecs.cases import codecs_with_option_sets, codecs_with_single_changes
from tests.unit.kernels.inputs import KINDS, SIZES, floats

FAST = [name for name in available() if name != "reference"]
KEY, OFFSET = 0x0123456789ABCDEF, 1000


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def all_verbs(codec: Codec, x: torch.Tensor, y: torch.Tensor) -> dict[str, bytes]:
    """Return the results of every verb for x and y as bytes; every optional argument is used once."""
    n, dtype = x.numel(), x.dtype
    residual = floats("normal", n, seed=9).to(x.device)
    residuals = [residual.clone(), residual.clone(), residual.clone()]
    decoded = [torch.full_like(x, 7) for _ in range(2)]
    running = torch.full((n,), 7.0, device=x.device)
    p = encode(codec, x, KEY, OFFSET)
    q = encode(codec, y, KEY + 1, OFFSET, residuals[0], decoded=decoded[0])
    results = {
        "encode": p,
        "encode with residual": q,
        "its residual": residuals[0],
        "its decoding": decoded[0],
        "decode": decode(codec, p, n, dtype),
        "reduce 1": reduce(codec, [q], n, dtype=dtype),
        "reduce 2": reduce(codec, [p, q], n, dtype=dtype),
        "reduce 3": reduce(codec, [p, q], n, local=y, position=1, divisor=3),
        "reduce into fp32": reduce(codec, [p, q], n, local=y, position=0, out=running),
        "reduce_encode": reduce_encode(
            codec, [p, q], n, x, 1, 3, residuals[1], key=KEY, offset=OFFSET, decoded=decoded[1]
        ),
        "reduce_encode's residual": residuals[1],
        "reduce_encode's decoding": decoded[1],
        "reduce_encode of a running sum": reduce_encode(
            codec, [q, q, p], n, running, residual=residuals[2], dtype=dtype, key=1
        ),
        "its residual again": residuals[2],
        "reduce_encode of payloads": reduce_encode(codec, [p, q], n, dtype=dtype, key=3, offset=2**32 - 40),
    }
    for op in codec.operations:
        results[f"{op} of 3"] = reduce(codec, [p, q], n, local=x, position=1, op=op)
        results[f"{op} of 2, encoded"] = reduce_encode(codec, [p], n, local=y, op=op, key=2)
    return {name: raw(result) for name, result in results.items()}


def compare(codec: Codec, x: torch.Tensor, y: torch.Tensor, kernels: Sequence[str] = FAST) -> None:
    with use("reference"):
        expected = all_verbs(codec, x, y)
    for kernel in kernels:
        with use(kernel):
            results = all_verbs(codec, x, y)
        for name, value in expected.items():
            assert results[name] == value, f"{kernel}: {name} of {x.numel()} {x.dtype} in {codec}"


def cases() -> list[tuple[Codec, str]]:
    """Codecs with kinds of input: every kind for codecs without options, one kind in turn for the others.

    The reference would take minutes for all pairs.
    """
    kinds, pairs = list(KINDS), []
    for number, codec in enumerate(codecs_with_option_sets()):
        pairs += [(codec, kind) for kind in ([kinds[number % len(kinds)]] if codec.options() else kinds)]
    return pairs


@pytest.mark.parametrize(("codec", "kind"), cases(), ids=str)
def test_every_kind_of_input(codec: Codec, kind: str) -> None:
    n = 2 * codec.granularity + 37
    compare(codec, floats(kind, n, seed=1), floats(kind, n, seed=2))


@pytest.mark.parametrize(("number", "codec"), list(enumerate(codecs_with_single_changes())), ids=str)
def test_every_type_and_size(number: int, codec: Codec) -> None:
    """Every size and every type for each codec; every pair of a size, a type and a kind for some codec."""
    kinds = ("normal", "nonfinite", "bits")
    for turn, n in enumerate(SIZES):
        dtype = FLOAT_TYPES[(turn + number) % len(FLOAT_TYPES)]
        kind = kinds[(turn + number // len(FLOAT_TYPES)) % len(kinds)]
        compare(codec, floats(kind, n, seed=n).to(dtype), floats(kind, n, seed=n + 1).to(dtype))


@pytest.mark.parametrize("kernel", FAST)
def test_every_fp16_value_decodes(kernel: str) -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    with use("reference"):
        expected = decode("fp16", halves, 2**16)
    with use(kernel):
        decoded = decode("fp16", halves, 2**16)
    nan = expected.isnan()
    assert torch.equal(decoded[~nan].view(torch.int32), expected[~nan].view(torch.int32))
    assert decoded[nan].isnan().all()


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
@pytest.mark.parametrize("kernel", available())
def test_casts_round_as_torch_does(kernel: str, spec: str) -> None:
    """For every exponent, sign and tie; NaNs, whose bits torch does not define, are made canonical."""
    low = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0x18000])
    words = (torch.arange(0, 2**32, 2**15)[:, None] + low).reshape(-1)
    x = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).view(torch.float32)
    with use(kernel):
        payload = encode(spec, x)
    cast = x.to(torch.float16 if spec == "fp16" else torch.bfloat16)
    expected = cast.view(torch.int16).clone()
    expected[x.isnan()] = 0x7E00 if spec == "fp16" else 0x7FC0
    assert torch.equal(payload[: 2 * x.numel()].view(torch.int16), expected)
