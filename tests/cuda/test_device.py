"""On a device: the CPU kernels' bytes for every codec of the registry, option, verb, type and size; streams, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtcomm.codecs import Codec, codec
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import cpu, dispatch
from dtcomm.kernels.types import Combine
from tests.unit.codecs import cases
from tests.unit.kernels.inputs import KINDS, SIZES, floats

pytest.importorskip("dtcomm._cuda", reason="_cuda was not built: no nvcc, or DTCOMM_CUDA=0")
cuda = pytest.importorskip("dtcomm.kernels.cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]
EVERYTHING = [each for each in cases.codecs_with_option_sets() if dispatch.runs_on("cuda", each)]
FEW = [each for each in cases.codecs_with_single_changes() if dispatch.runs_on("cuda", each)]
FIELDS = ("local", "residual", "payload_out", "out")


def moved(call: Combine, shift: int = 0) -> Combine:
    """The call with copies of its tensors on the device, `shift` elements off sixteen bytes (payloads excepted)."""

    def copied(name: str, tensor: torch.Tensor) -> torch.Tensor:
        off = 0 if name == "payload_out" else shift
        return torch.empty(tensor.numel() + off, dtype=tensor.dtype, device="cuda")[off:].copy_(tensor)

    there: dict[str, Any] = {"payloads": tuple(payload.cuda() for payload in call.payloads)}
    for name in FIELDS:
        tensor = getattr(call, name)
        there[name] = None if tensor is None else copied(name, tensor)
    if call.out is not None and call.out is call.local:
        there["out"] = there["local"]
    return replace(call, **there)


def compare(call: Combine, shift: int = 0) -> None:
    """Run on both; every tensor must end as the same bytes."""
    device = moved(call, shift)
    cuda.combine(device)
    cpu.combine("generic", call)
    for name in FIELDS:
        here, there = getattr(call, name), getattr(device, name)
        if here is not None:
            same = torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))
            assert same, f"{name} of {call.numel} {call.dtype} in {call.codec}, {len(call.payloads)} payloads"


def room(each: Codec, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((each.wire_bytes(n, dtype),), 0xAA, dtype=torch.uint8)


def payload_of(each: Codec, x: torch.Tensor, key: int) -> torch.Tensor:
    payload = room(each, x.numel(), x.dtype)
    cpu.combine(
        "generic",
        Combine(codec=each, numel=x.numel(), dtype=x.dtype, local=x, key=key, payload_out=payload),
    )
    return payload


def calls(each: Codec, x: torch.Tensor, counts: tuple[int, ...] = (1, 2, 3, 4, 8)) -> Iterator[Combine]:
    """Every verb, with and without its optional parts."""
    n, dtype = x.numel(), x.dtype
    call = Combine(codec=each, numel=n, dtype=dtype, key=0x0123456789ABCDEF, offset=2**32 - n // 2)

    def residual() -> torch.Tensor:
        return floats("normal", n, seed=9)

    yield replace(call, local=x, payload_out=room(each, n, dtype))
    yield replace(
        call, local=x, payload_out=room(each, n, dtype), residual=residual(), out=torch.full_like(x, 7)
    )
    in_place = x.clone()
    yield replace(call, local=in_place, payload_out=room(each, n, dtype), out=in_place)
    sent = tuple(payload_of(each, x.flip(0) if t % 2 else x * (t + 1), key=t) for t in range(max(counts)))
    yield replace(call, payloads=sent[:1], out=torch.full((n,), 7.0, dtype=dtype))  # decode
    for count in counts:
        payloads, position = sent[:count], count // 2
        yield replace(call, payloads=payloads, out=torch.full((n,), 7.0))
        yield replace(
            call, payloads=payloads, local=x, position=position, divisor=3, out=torch.full_like(x, 7)
        )
        encoded = replace(call, payloads=payloads, payload_out=room(each, n, dtype))
        yield encoded
        yield replace(encoded, local=x.float(), position=count, residual=residual(), divisor=count + 1)
    for op in each.operations:
        if op != "sum":
            yield replace(call, payloads=sent[:2], local=x, position=1, op=op, out=torch.full_like(x, 7))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("each", EVERYTHING, ids=str)
def test_inputs(each: Codec, kind: str) -> None:
    for call in calls(each, floats(kind, 2 * each.granularity + 37, seed=1)):
        compare(call)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("each", FEW, ids=str)
def test_types_and_sizes(each: Codec, dtype: torch.dtype) -> None:
    for n in SIZES[1:]:
        for call in calls(each, floats("nonfinite", n, seed=n).to(dtype), counts=(1, 3)):
            compare(call)


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("each", FEW, ids=str)
def test_tensors_of_any_alignment(each: Codec, shift: int) -> None:
    for call in calls(each, floats("normal", 5000, seed=shift), counts=(1, 2)):
        compare(call, shift)


# A kernel of each kind, on little: compute-sanitizer takes fifty times as long.
@pytest.mark.parametrize(
    "spec",
    ["none", "fp16", "int8", "int8:block=4096", "int4:block=128", "int3:round=stochastic", "fp8_e4m3"]
    + ["int4:rotate=hadamard", "int2:spikes=1", "mxfp4", "sign", "topk:ratio=0.25", "randk:ratio=0.25"],
)
def test_sanitizer_sized(spec: str) -> None:
    for call in calls(codec(spec), floats("normal", 700, seed=1), counts=(2,)):
        compare(call, 1)


@pytest.mark.parametrize("spec", ["none", "fp16", "int8", "fp8_e4m3", "int8:round=stochastic"])
def test_large(spec: str) -> None:
    for call in calls(codec(spec), floats("normal", 3_000_001, seed=3), counts=(1, 8)):
        compare(call)


@pytest.mark.parametrize("spec", ["none", "bf16", "int8", "int8:round=stochastic"])
def test_more_payloads_than_arguments_hold(spec: str) -> None:
    for call in calls(codec(spec), floats("normal", 3000, seed=3), counts=(16, 17, 40)):
        compare(call)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
)
def test_types_that_are_summed_as_themselves(dtype: torch.dtype) -> None:
    for n in SIZES[1:]:
        x = (floats("normal", n, seed=n) * 100).to(dtype)
        for call in calls(codec("none"), x, counts=(1, 2)):
            if call.residual is None and call.divisor == 1 and (call.out is None or call.out.dtype == dtype):
                if call.local is None or call.local.dtype == dtype:
                    compare(call)


def test_runs_on_the_current_stream() -> None:
    """What is queued behind a long wait on a side stream reads what that stream wrote."""
    each, n = codec("int8"), 1 << 20
    x = torch.zeros(n, device="cuda")
    payload, out = room(each, n, x.dtype).cuda(), torch.empty(n, device="cuda")

    def there_and_back() -> None:
        cuda.combine(Combine(codec=each, numel=n, dtype=x.dtype, local=x, payload_out=payload))
        cuda.decode(each, payload, n, x.dtype, out)

    there_and_back()  # kernels are loaded when they are first used, which may wait
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)  # half a second
        x.fill_(1.0)
        there_and_back()
    assert not side.query(), "the call waited for the device"
    torch.cuda.current_stream().wait_stream(side)
    expected = torch.empty(1)
    cpu.decode("generic", each, payload_of(each, torch.ones(1), 0), 1, x.dtype, expected)
    assert torch.equal(out.cpu(), expected.expand(n)) and expected > 0.9


@pytest.mark.parametrize("each", FEW, ids=str)
def test_can_be_captured(each: Codec) -> None:
    """A graph replays the work on what its tensors hold then."""
    n = 5000
    x = floats("normal", n, seed=1).cuda()
    payload, out = room(each, n, x.dtype).cuda(), torch.empty(n, device="cuda")
    residual = torch.zeros(n, device="cuda")
    call = Combine(codec=each, numel=n, dtype=x.dtype, local=x, residual=residual, payload_out=payload, key=5)
    both = Combine(codec=each, numel=n, dtype=x.dtype, payloads=(payload, payload), out=out)
    cuda.combine(call)  # kernels are loaded when they are first used
    cuda.combine(both)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.combine(call)
        cuda.combine(both)
    x.copy_(floats("normal", n, seed=2))
    residual.zero_()
    graph.replay()
    here = replace(
        call,
        local=floats("normal", n, seed=2),
        residual=torch.zeros(n),
        payload_out=room(each, n, x.dtype),
    )
    cpu.combine("generic", here)
    assert here.payload_out is not None and torch.equal(payload.cpu(), here.payload_out)
    wanted = torch.empty(n)
    cpu.combine("generic", replace(both, payloads=(here.payload_out, here.payload_out), out=wanted))
    assert torch.equal(out.cpu().view(torch.uint8), wanted.view(torch.uint8))


def test_too_many_payloads_for_a_graph_are_refused() -> None:
    each, n = codec("int8"), 64
    payloads = (room(each, n, torch.float32).cuda(),) * 17
    out = torch.empty(n, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(ValueError, match="at most 16"):
            cuda.combine(Combine(codec=each, numel=n, dtype=out.dtype, payloads=payloads, out=out))
        out.zero_()
