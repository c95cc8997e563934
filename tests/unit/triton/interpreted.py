"""Triton's kernels against the reference, byte for byte, in Triton's interpreter: `TRITON_INTERPRET=1 pytest FILE`.

The interpreter takes milliseconds for what a program does in microseconds, so inputs are mixed: each has stretches of
every kind, in tiles that are whole and one that is cut. test_triton.py runs this file.
"""

from __future__ import annotations

import pytest
import torch

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.kernels import available, current, use
from dtcomm.kernels.epilogue import empty_quantized, epilogue, epilogue_task
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from dtcomm.kernels.triton import launch
from tests.unit.kernels.inputs import floats
from tests.unit.kernels.test_bit_exact import compare, raw
from tests.unit.triton.cases import FIRST_TIER, PLAIN, codecs_with_option_sets, mixed

MIXED = [parse("int8:block=16,symmetric=false"), parse("fp16")]


def test_triton_runs_in_the_interpreter() -> None:
    assert launch.INTERPRETED and available()[-2:] == ("reference", "triton")
    assert {str(codec) for codec in PLAIN} == FIRST_TIER
    with use("triton"):
        assert current() == "triton"


@pytest.mark.parametrize("codec", codecs_with_option_sets(), ids=str)
def test_every_option(codec: Codec) -> None:
    tile = max(launch.TILE, codec.granularity)
    n = tile + 37
    compare(codec, mixed(n, seed=1), mixed(n, seed=2), ["triton"])


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("fp16", torch.float16),
        ("bf16", torch.float16),
        ("bf16", torch.bfloat16),
        ("int8", torch.float16),
        ("int4", torch.bfloat16),
        ("fp8_e4m3", torch.bfloat16),
    ],
)
def test_every_type(spec: str, dtype: torch.dtype) -> None:
    compare(parse(spec), mixed(500, seed=3).to(dtype), mixed(500, seed=4).to(dtype), ["triton"])


@pytest.mark.parametrize("codec", PLAIN, ids=str)
def test_every_size(codec: Codec) -> None:
    for n in (0, 1, 17, 127, 1024, 1025, 2048):
        x, old = mixed(n, seed=5), floats("normal", n, seed=6)
        results = []
        for kernel in ("reference", "triton"):
            with use(kernel):
                residual, decoded = old.clone(), torch.empty_like(x)
                payload = encode(codec, x, 1, 2, residual, decoded=decoded)
                results.append([raw(t) for t in (payload, residual, decoded, decode(codec, payload, n))])
        assert results[0] == results[1], n


@pytest.mark.parametrize(
    ("count", "position"),
    [(0, 0), (1, 1), (5, 2), (8, 0), (8, 8), (9, 0), (9, 8), (9, 9), (17, 5), (17, 12), (17, 16), (17, 17)],
)
def test_any_number_of_terms(count: int, position: int) -> None:
    """Also more terms than one launch takes, with the local term in each of the launches."""
    n = 300
    x, old = mixed(n, seed=50), floats("normal", n, seed=51)
    for codec in MIXED:
        wires = [encode(codec, mixed(n, seed=s)) for s in range(count)]
        for op in codec.operations if count == 9 else ("sum",):
            results = []
            for kernel in ("reference", "triton"):
                with use(kernel):
                    residual, decoded = old.clone(), torch.empty(n)
                    total = reduce(codec, wires, n, x, position, 3, op=op)
                    wire = reduce_encode(
                        codec, wires, n, x, position, 3, residual, op=op, decoded=decoded, key=9
                    )
                results.append([raw(t) for t in (total, wire, residual, decoded)])
            assert results[0] == results[1], (codec, op)


@pytest.mark.parametrize(
    ("key", "start"), [(0, 2**32 - 1000), (2**31, 2**63 - 700), (2**64 - 1, 2**64 - 3000), (2**32, 0)]
)
def test_stochastic_rounding_at_large_indices(key: int, start: int) -> None:
    """Indices pass a multiple of 2^32 within a tile; words of keys and indices are unsigned."""
    x = floats("normal", 2500)
    payloads = []
    for kernel in ("reference", "triton"):
        with use(kernel):
            payloads.append(encode("int8:round=stochastic", x, key, start))
    assert torch.equal(*payloads)


def test_every_fp16_value_and_every_fp8_code() -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    three = torch.tensor([0x40] * 4, dtype=torch.uint8)  # the bf16 scales of two blocks: 3.0
    wire = torch.cat([three, torch.arange(256).to(torch.uint8), torch.zeros(12, dtype=torch.uint8)])
    results = []
    for kernel in ("generic", "triton"):
        with use(kernel):
            alone = reduce("int8", [], 2**16, halves.view(torch.float16), out=torch.empty(2**16))
            values = decode("fp16", halves.view(torch.uint8), 2**16), decode("fp8_e4m3", wire, 256)
        results.append((*values, alone))
    for expected, result in zip(*results, strict=True):
        nan = expected.isnan()
        assert torch.equal(result[~nan].view(torch.int32), expected[~nan].view(torch.int32))
        assert result[nan].isnan().all()
    assert raw(results[0][2]) == raw(results[1][2])  # a lone term is copied with its NaNs


@pytest.mark.parametrize("codec", MIXED, ids=str)
def test_alignment_and_aliased_arguments(codec: Codec) -> None:
    """Elements may have any alignment, `decoded` may be x, `out` may be local; no other memory is written."""
    n, guard = codec.granularity + 45, 0xA5
    x, old = mixed(n, seed=7), floats("normal", n, seed=8)
    with use("reference"):
        residual, decoded = old.clone(), torch.empty(n)
        payload = encode(codec, x, 3, 4, residual, decoded=decoded)
        total = reduce(codec, [payload], n, x)
    room = torch.full((4 * n + 64,), guard, dtype=torch.uint8)
    wire = torch.full((len(payload) + 64,), guard, dtype=torch.uint8)
    for skew in (0, 4):
        elements = room[skew : skew + 4 * n].view(torch.float32).copy_(x)
        with use("triton"):
            new_residual = old.clone()
            encode(codec, elements, 3, 4, new_residual, wire[: len(payload)], decoded=elements)
        assert torch.equal(wire[: len(payload)], payload) and (wire[len(payload) :] == guard).all()
        assert raw(elements) == raw(decoded) and raw(new_residual) == raw(residual)
        assert (room[:skew] == guard).all() and (room[skew + 4 * n :] == guard).all()
        elements.copy_(x)
        with use("triton"):
            reduce(codec, [payload], n, elements, out=elements)
        assert raw(elements) == raw(total)
        room.fill_(guard)


@pytest.mark.parametrize(
    ("rows", "features", "dtype"),
    [(1, 1, torch.float32), (9, 40, torch.bfloat16), (2, 64, torch.float32), (2, 20, torch.float16)],
)
def test_epilogue(rows: int, features: int, dtype: torch.dtype) -> None:
    """Bias, residual and norm, of payloads and of unencoded sums."""
    generator = torch.Generator().manual_seed(features)
    x, stream, bias, weight = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, features), (rows, features), (features,), (features,))
    )
    x[0, 0] = torch.inf if rows > 2 else 0
    payload = encode("int8", x.view(-1).nan_to_num(posinf=1.0))
    terms = [{}, {"bias": bias}, {"bias": bias, "addend": stream}]
    for arguments in terms:
        results = []
        for kernel in ("reference", "triton"):
            with use(kernel):
                out, normed, again = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
                epilogue(
                    "int8", [(payload, x.numel())], out, **arguments, weight=weight, eps=1e-5, norm_out=normed
                )
                sums = x.clone()
                epilogue_task(sums, **arguments, eps=1e-5, norm_out=again)()
                tensors = [out, normed, sums, again]
                for values in (torch.float8_e4m3fn, torch.int8):
                    for group in {features, 1}:
                        quantized = empty_quantized(x, values, group)
                        epilogue_task(x.clone(), **arguments, eps=1e-5, quantized=quantized)()
                        tensors += [quantized.values.view(torch.uint8), quantized.scales]
                results.append([raw(tensor) for tensor in tensors])
        assert results[0] == results[1], arguments


def test_unsupported_codecs_and_alignments_are_refused() -> None:
    x = torch.ones(100)
    with use("triton"):
        with pytest.raises(ValueError, match=r"codec: .*'triton'.*'none'"):
            encode("none", x)
        with pytest.raises(ValueError, match=r"codec: .*'triton'.*'fp8_e5m2'"):
            encode("fp8_e5m2", x)
        with pytest.raises(ValueError, match=r"out: .*aligned to 16 bytes"):
            encode("int8", x, out=torch.empty(200, dtype=torch.uint8)[1:145])
