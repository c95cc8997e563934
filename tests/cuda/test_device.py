"""CUDA kernels give the CPU kernels' bytes for every codec, option, verb, type and size; streams and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dtcomm.codecs import Codec, codec
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import cpu, local_tasks
from dtcomm.kernels.calls import Combine
from tests.unit.codecs import cases
from tests.unit.collectives import test_rounded_sum as rounded
from tests.unit.kernels.inputs import KINDS, SIZES, floats

pytest.importorskip("dtcomm._cuda", reason="_cuda was not built: no nvcc, or DTCOMM_CUDA=0")
cuda = pytest.importorskip("dtcomm.kernels.cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]
EVERYTHING = [candidate for candidate in cases.codecs_with_option_sets() if candidate.has_cuda_kernel]
FEW = [candidate for candidate in cases.codecs_with_single_changes() if candidate.has_cuda_kernel]
FIELDS = ("local", "residual", "payload_out", "out")


def on_gpu(call: Combine, shift: int = 0) -> Combine:
    """The call with copies of its tensors on the device, `shift` elements off sixteen bytes (payloads excepted)."""

    def shifted_copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        start = 0 if name == "payload_out" else shift
        return torch.empty(tensor.numel() + start, dtype=tensor.dtype, device="cuda")[start:].copy_(tensor)

    tensors: dict[str, Any] = {"payloads": tuple(payload.cuda() for payload in call.payloads)}
    for name in FIELDS:
        tensor = getattr(call, name)
        tensors[name] = None if tensor is None else shifted_copy(name, tensor)
    if call.out is not None and call.out is call.local:
        tensors["out"] = tensors["local"]
    return call._replace(**tensors)


def compare(call: Combine, shift: int = 0) -> None:
    """Run the call on the GPU and on the CPU; every tensor must end with the same bytes."""
    gpu_call = on_gpu(call, shift)
    cuda.combine(gpu_call)
    cpu.combine("generic", call)
    for name in FIELDS:
        expected, actual = getattr(call, name), getattr(gpu_call, name)
        if expected is not None:
            left, right = expected.view(torch.uint8), actual.cpu().view(torch.uint8)
            assert torch.equal(left, right), f"{name} of {describe(call)}: {difference(left, right)}"


def describe(call: Combine) -> str:
    given = [name for name in FIELDS if getattr(call, name) is not None]
    return f"{call.numel} {call.dtype} in {call.codec}, {len(call.payloads)} payloads, {call.op}, {' '.join(given)}"


def difference(expected: torch.Tensor, actual: torch.Tensor) -> str:
    """Where bytes differ, and the sixteen around the first of them."""
    places = (expected != actual).nonzero().flatten().tolist()
    begin = places[0] // 4 * 4
    around = [bytes(tensor[begin : begin + 16].tolist()).hex(" ", 4) for tensor in (expected, actual)]
    return (
        f"{len(places)} of {expected.numel()} bytes differ, first {places[:8]}; "
        f"from byte {begin}: expected {around[0]}, got {around[1]}"
    )


def empty_payload(codec: Codec, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((codec.wire_bytes(n, dtype),), 0xAA, dtype=torch.uint8)


def payload_from_cpu(codec: Codec, x: torch.Tensor, key: int) -> torch.Tensor:
    payload = empty_payload(codec, x.numel(), x.dtype)
    cpu.combine(
        "generic",
        Combine(codec=codec, numel=x.numel(), dtype=x.dtype, local=x, key=key, payload_out=payload),
    )
    return payload


def calls(codec: Codec, x: torch.Tensor, counts: tuple[int, ...] = (1, 2, 3, 4, 8)) -> Iterator[Combine]:
    """Every verb, with and without its optional parts."""
    n, dtype = x.numel(), x.dtype
    call = Combine(codec=codec, numel=n, dtype=dtype, key=0x0123456789ABCDEF, offset=2**32 - n // 2)

    def residual() -> torch.Tensor:
        return floats("normal", n, seed=9)

    yield call._replace(local=x, payload_out=empty_payload(codec, n, dtype))
    yield call._replace(
        local=x,
        payload_out=empty_payload(codec, n, dtype),
        residual=residual(),
        out=torch.full_like(x, 7),
    )
    in_place = x.clone()
    yield call._replace(local=in_place, payload_out=empty_payload(codec, n, dtype), out=in_place)
    sent = tuple(
        payload_from_cpu(codec, x.flip(0) if t % 2 else x * (t + 1), key=t) for t in range(max(counts))
    )
    yield call._replace(payloads=sent[:1], out=torch.full((n,), 7.0, dtype=dtype))  # decode
    for count in counts:
        payloads, position = sent[:count], count // 2
        yield call._replace(payloads=payloads, out=torch.full((n,), 7.0))
        yield call._replace(
            payloads=payloads, local=x, position=position, divisor=3, out=torch.full_like(x, 7)
        )
        encoded = call._replace(payloads=payloads, payload_out=empty_payload(codec, n, dtype))
        yield encoded
        yield encoded._replace(local=x.float(), position=count, residual=residual(), divisor=count + 1)
    for op in codec.operations:
        if op != "sum":
            yield call._replace(payloads=sent[:2], local=x, position=1, op=op, out=torch.full_like(x, 7))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", EVERYTHING, ids=str)
def test_inputs_match_cpu_bytes(codec: Codec, kind: str) -> None:
    for call in calls(codec, floats(kind, 2 * codec.granularity + 37, seed=1)):
        compare(call)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("codec", FEW, ids=str)
def test_types_and_sizes_match_cpu_bytes(codec: Codec, dtype: torch.dtype) -> None:
    for n in SIZES[1:]:
        for call in calls(codec, floats("nonfinite", n, seed=n).to(dtype), counts=(1, 3)):
            compare(call)


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("codec", FEW, ids=str)
def test_unaligned_tensors_match_cpu_bytes(codec: Codec, shift: int) -> None:
    for call in calls(codec, floats("normal", 5000, seed=shift), counts=(1, 2)):
        compare(call, shift)


# A kernel of each kind, on small tensors: compute-sanitizer takes fifty times as long.
@pytest.mark.parametrize(
    "spec",
    ["none", "fp16", "int8", "int8:block=4096", "int4:block=128", "int3:round=stochastic", "fp8_e4m3"]
    + ["int4:rotate=hadamard", "int2:spikes=1", "mxfp4", "sign", "topk:ratio=0.25", "randk:ratio=0.25"],
)
def test_sanitizer_sized_kernels(spec: str) -> None:
    for call in calls(codec(spec), floats("normal", 700, seed=1), counts=(2,)):
        compare(call, 1)


@pytest.mark.parametrize("spec", ["none", "fp16", "int8", "fp8_e4m3", "int8:round=stochastic"])
def test_large_tensors_match_cpu_bytes(spec: str) -> None:
    for call in calls(codec(spec), floats("normal", 3_000_001, seed=3), counts=(1, 8)):
        compare(call)


@pytest.mark.parametrize("spec", ["none", "bf16", "int8", "int8:round=stochastic"])
def test_more_payloads_than_kernel_arguments_hold(spec: str) -> None:
    for call in calls(codec(spec), floats("normal", 3000, seed=3), counts=(16, 17, 40)):
        compare(call)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
)
def test_exact_types_match_cpu_bytes(dtype: torch.dtype) -> None:
    for n in SIZES[1:]:
        x = (floats("normal", n, seed=n) * 100).to(dtype)
        for call in calls(codec("none"), x, counts=(1, 2)):
            if call.residual is None and call.divisor == 1 and (call.out is None or call.out.dtype == dtype):
                if call.local is None or call.local.dtype == dtype:
                    compare(call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", rounded.KINDS)
def test_rounded_sums_match_cpu_bytes(kind: str, dtype: torch.dtype) -> None:
    for ranks, numel in ((1, 1), (2, 1027), (8, 70_001), (64, 333)):
        terms = torch.stack(rounded.adversarial(kind, ranks, numel, dtype, seed=numel))
        terms[0, 0] = torch.inf if ranks == 8 else 1
        for divisor in (1, ranks):
            expected = local_tasks.sum_rounded(terms, divisor)
            actual = local_tasks.sum_rounded(terms.cuda(), divisor)
            for own, of_cpu in zip(actual, expected, strict=True):
                assert torch.equal(own.cpu().view(torch.uint8), of_cpu.view(torch.uint8)), (ranks, divisor)


def test_kernels_run_on_the_current_stream() -> None:
    """A call queued behind a long wait on a side stream reads what that stream wrote."""
    int8, n = codec("int8"), 1 << 20
    x = torch.zeros(n, device="cuda")
    payload, out = empty_payload(int8, n, x.dtype).cuda(), torch.empty(n, device="cuda")

    def encode_and_decode() -> None:
        cuda.combine(Combine(codec=int8, numel=n, dtype=x.dtype, local=x, payload_out=payload))
        cuda.decode(int8, payload, n, x.dtype, out)

    encode_and_decode()  # kernels are loaded when they are first used, which may wait
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)  # half a second
        x.fill_(1.0)
        encode_and_decode()
    assert not side.query(), "the call waited for the device"
    torch.cuda.current_stream().wait_stream(side)
    expected = torch.empty(1)
    cpu.decode("generic", int8, payload_from_cpu(int8, torch.ones(1), 0), 1, x.dtype, expected)
    assert torch.equal(out.cpu(), expected.expand(n)) and expected > 0.9


@pytest.mark.parametrize("codec", FEW, ids=str)
def test_graph_replays_kernels(codec: Codec) -> None:
    """A replay computes with the values that the tensors hold at that time."""
    n = 5000
    x = floats("normal", n, seed=1).cuda()
    payload, out = empty_payload(codec, n, x.dtype).cuda(), torch.empty(n, device="cuda")
    residual = torch.zeros(n, device="cuda")
    call = Combine(
        codec=codec, numel=n, dtype=x.dtype, local=x, residual=residual, payload_out=payload, key=5
    )
    both = Combine(codec=codec, numel=n, dtype=x.dtype, payloads=(payload, payload), out=out)
    cuda.combine(call)  # kernels are loaded when they are first used
    cuda.combine(both)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.combine(call)
        cuda.combine(both)
    x.copy_(floats("normal", n, seed=2))
    residual.zero_()
    graph.replay()
    cpu_call = call._replace(
        local=floats("normal", n, seed=2),
        residual=torch.zeros(n),
        payload_out=empty_payload(codec, n, x.dtype),
    )
    cpu.combine("generic", cpu_call)
    assert cpu_call.payload_out is not None and torch.equal(payload.cpu(), cpu_call.payload_out)
    expected = torch.empty(n)
    cpu.combine("generic", both._replace(payloads=(cpu_call.payload_out, cpu_call.payload_out), out=expected))
    assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_too_many_payloads_for_a_graph_are_refused() -> None:
    int8, n = codec("int8"), 64
    payloads = (empty_payload(int8, n, torch.float32).cuda(),) * 17
    out = torch.empty(n, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(ValueError, match="at most 16"):
            cuda.combine(Combine(codec=int8, numel=n, dtype=out.dtype, payloads=payloads, out=out))
        out.zero_()
