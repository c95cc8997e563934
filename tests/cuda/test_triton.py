"""Triton's kernels on a device give the CPU kernels' bytes for every codec they support, verb, type and size."""

from __future__ import annotations

import pytest
import torch

from dtcomm.codecs import Codec, codec
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import triton, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.kernels.inputs import KINDS, SIZES, floats
from tests.unit.kernels.test_bit_exact import all_verbs, raw
from tests.unit.triton.cases import PLAIN, codecs_with_option_sets, mixed

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
    pytest.mark.skipif(triton.interpreted(), reason="TRITON_INTERPRET: nothing would run on the device"),
]


def compare(codec: Codec, x: torch.Tensor, y: torch.Tensor) -> None:
    expected = all_verbs(codec, x, y)
    with use("triton"):
        got = all_verbs(codec, x.cuda(), y.cuda())
    for name, value in expected.items():
        assert got[name] == value, f"{name} of {x.numel()} {x.dtype} in {codec}"


@pytest.mark.parametrize("codec", codecs_with_option_sets(), ids=str)
def test_codec_options_match_cpu_bytes(codec: Codec) -> None:
    for n in (2 * max(2048, codec.granularity) + 37, 8192):
        compare(codec, mixed(n, seed=1), mixed(n, seed=2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", PLAIN, ids=str)
def test_inputs_match_cpu_bytes(codec: Codec, kind: str) -> None:
    compare(codec, floats(kind, 4133, seed=1), floats(kind, 4133, seed=2))


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("codec", PLAIN, ids=str)
def test_types_and_sizes_match_cpu_bytes(codec: Codec, dtype: torch.dtype) -> None:
    for n in SIZES:
        compare(codec, mixed(n, seed=3).to(dtype), mixed(n, seed=4).to(dtype))


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_casts_over_every_exponent_and_tie(spec: str) -> None:
    """The GPU's conversion instruction rounds as the CPU's integer arithmetic does."""
    low = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0x18000])
    words = (torch.arange(0, 2**32, 2**15)[:, None] + low).reshape(-1)
    x = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).view(torch.float32)
    with use("triton"):
        got = encode(spec, x.cuda())
    assert torch.equal(got.cpu(), encode(spec, x))


def test_every_half_matches_cpu() -> None:
    """Every fp16 value, decoded, and as the only term of a sum, NaNs included."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    expected = reduce("int8", [], 2**16, halves.view(torch.float16), out=torch.empty(2**16))
    numbers = decode("fp16", halves.view(torch.uint8), 2**16)
    with use("triton"):
        on_gpu = halves.cuda()
        alone = reduce("int8", [], 2**16, on_gpu.view(torch.float16), out=torch.empty(2**16, device="cuda"))
        values = decode("fp16", on_gpu.view(torch.uint8), 2**16).cpu()
    assert raw(alone) == raw(expected)
    nan = numbers.isnan()
    assert (
        torch.equal(values[~nan].view(torch.int32), numbers[~nan].view(torch.int32))
        and values[nan].isnan().all()
    )


@pytest.mark.parametrize("spec", ["int8:round=stochastic", "bf16"])
@pytest.mark.parametrize("count", [1, 4, 8, 9, 17])
def test_many_payloads_match_cpu_bytes(spec: str, count: int) -> None:
    n = 5000
    x, wires = mixed(n, seed=9), [encode(spec, mixed(n, seed=s)) for s in range(count)]
    for position in {0, count // 2, count}:
        expected = reduce_encode(spec, wires, n, x, position, 3, key=5)
        with use("triton"):
            got = reduce_encode(spec, [wire.cuda() for wire in wires], n, x.cuda(), position, 3, key=5)
        assert torch.equal(got.cpu(), expected)


def test_tensor_larger_than_one_launch() -> None:
    """A tensor of 1 GiB that is decoded to 2 GiB of fp32: byte offsets need more than 31 bits."""
    n = (1 << 29) + 1000
    x = torch.zeros(n, device="cuda", dtype=torch.float16)
    tail = floats("normal", 3000)
    x[-3000:] = tail.half().cuda()
    with use("triton"):
        payload = encode("int8", x)
        back = decode("int8", payload, n, torch.float32)
    start = n - 3000
    assert not back[:start].any()
    torch.testing.assert_close(back[start:].cpu(), tail, atol=0.02, rtol=0.02)
    whole = n // 1024 * 1024
    assert torch.equal(payload[whole // 1024 * 1088 :].cpu(), encode("int8", x[whole:].cpu()))


def test_kernels_run_on_the_current_stream_and_in_graphs() -> None:
    """A call is queued on the current stream, and a graph may capture it."""
    int8, n = codec("int8"), 1 << 20
    x, out = torch.zeros(n, device="cuda"), torch.empty(n, device="cuda")
    payload = torch.empty(int8.wire_bytes(n), dtype=torch.uint8, device="cuda")
    once, twice = (decode(int8, encode(int8, torch.full((n,), value)), n)[0] for value in (1.0, 2.0))
    assert 0.9 < once < 1.1 < 1.9 < twice
    with use("triton"):
        encode(int8, x, out=payload)
        decode(int8, payload, n, out=out)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.fill_(1.0)
            encode(int8, x, out=payload)
            decode(int8, payload, n, out=out)
        side.synchronize()
        assert (out == once.item()).all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            encode(int8, x, out=payload)
            decode(int8, payload, n, out=out)
        x.fill_(2.0)
        graph.replay()
        torch.cuda.synchronize()
    assert (out == twice.item()).all()


def test_compiled_function_matches_cpu_bits() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return decode("int8", encode("int8", x * 2), x.numel()) + 1

    x = floats("normal", 5000)
    with use("triton"):
        got = torch.compile(function, fullgraph=True)(x.cuda())
    assert torch.equal(got.cpu(), function(x))
