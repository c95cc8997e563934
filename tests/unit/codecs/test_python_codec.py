# ruff: noqa: E501 - a refusal a line reads as a table
"""Codecs written in Python: what is checked when they are registered, and the bits of the kernels' verbs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dtcomm
from dtcomm import codecs, kernels
from dtcomm.codecs import spec as registry
from dtcomm.compress.policy import Policy
from dtcomm.compress.spec import AUTO, COMPRESSORS, gaussian_error, parse_scheme
from dtcomm.fsdp.options import FEEDBACKS, PARAMETER_PREFIXES, parse_spec
from dtcomm.kernels import ops
from dtcomm.runtime.cuda_peer.launch import why_not
from dtcomm.runtime.types import OpSpec, TensorSpec
from tests.support import python_codecs
from tests.support.python_codecs import bf16_bytes, decode_bf16, encode_bf16

SPECIAL = (0.0, -0.0, 1e-40, -1e-30, 3.0, math.inf, -math.inf, math.nan, 3e38)


@pytest.fixture(autouse=True)
def no_registration_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", {})


def test_a_registered_name_is_valid_where_a_codec_is() -> None:
    codec = codecs.custom("mine", encode_bf16, decode_bf16, bf16_bytes)
    assert codecs.codec("mine") is codec and str(codec) == codec.name == "mine"
    assert codecs.names()[-1] == "mine"
    assert codec.wire_bytes(1000) == 2000 and codec.wire_bytes(3) == 16 and codec.wire_bytes(0) == 0
    assert codec.granularity == 1024
    assert parse_scheme("mine/int4").inside is codec  # type: ignore[union-attr]
    assert Policy.parse("ndim<2 -> none; * -> mine").rules[1].codec is codec
    assert parse_spec("ef:mine", FEEDBACKS, "gradients").inside is codec
    assert 0 < gaussian_error(codec) < 0.01
    assert codecs.custom("mine", encode_bf16, decode_bf16, bf16_bytes) is codec  # the same again


def test_names_that_mean_something_in_a_spec_are_reserved() -> None:
    special = {AUTO, *COMPRESSORS, *FEEDBACKS, *PARAMETER_PREFIXES} - {""}
    assert special <= set(registry.RESERVED)


def zero_scale(x: torch.Tensor) -> torch.Tensor:
    return (x / x.abs().max() * 100).to(torch.bfloat16).view(torch.uint8)


def changing(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(0.5).to(torch.bfloat16).view(torch.uint8)


def random(x: torch.Tensor) -> torch.Tensor:
    return (x + torch.rand_like(x)).to(torch.bfloat16).view(torch.uint8)


def raising(x: torch.Tensor) -> torch.Tensor:
    return x.view(8, -1).to(torch.bfloat16).view(torch.uint8)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"name": 3}, TypeError, "name: expected a str, got int"),
        ({"name": "my codec"}, ValueError, "name: expected a letter, .* got 'my codec'"),
        ({"name": "a:b"}, ValueError, "name: expected a letter, .* got 'a:b'"),
        ({"name": "int8"}, ValueError, "name: 'int8' is taken; taken are none, fp16, .*powersgd"),
        ({"name": "powersgd"}, ValueError, "name: 'powersgd' is taken"),
        ({"encode": None}, TypeError, "encode: expected a function, got NoneType"),
        ({"decode": "bf16"}, TypeError, "decode: expected a function, got str"),
        ({"wire_bytes": 2}, TypeError, "wire_bytes: expected a function, got int"),
        ({"wire_bytes": lambda n: 2.0 * n}, TypeError, "wire_bytes: of 1 elements is 2.0; expected an int"),
        ({"wire_bytes": lambda n: n - 100}, ValueError, "wire_bytes: of 1 elements is -99; expected 0 or more"),
        ({"wire_bytes": lambda n: n // 0}, ValueError, r"wire_bytes: raised ZeroDivisionError\(.*\) for 1 elements"),
        ({"wire_bytes": lambda n: 3 * n}, ValueError, r"encode: returned shape \(2,\); expected \(3,\) elements: what wire_bytes says"),
        ({"encode": lambda x: x.bfloat16()}, TypeError, "encode: returned torch.bfloat16; expected torch.uint8"),
        ({"encode": lambda x: None}, TypeError, "encode: returned NoneType; expected a tensor"),
        ({"encode": lambda: 3}, ValueError, r"encode: raised TypeError\(.* for torch.float32 of 1 elements"),
        ({"encode": raising}, ValueError, "encode: raised RuntimeError.* for torch.float32 of 1 elements on cpu"),
        ({"encode": changing}, ValueError, "encode: changed its argument; it must leave it as it is"),
        ({"encode": random}, ValueError, "encode: gave other bytes when it was called again; random .* seed `key`"),
        ({"encode": zero_scale}, ValueError, "encode: 1 zeros decode to NaN or Inf, as a division by a scale of 0 gives"),
        ({"decode": lambda p, n: p.view(torch.bfloat16)}, TypeError, "decode: returned torch.bfloat16; expected torch.float32"),
        ({"decode": lambda p, n: p.view(torch.bfloat16).float()[:-1]}, ValueError, r"decode: returned shape \(0,\); expected \(1,\)"),
        ({"decode": lambda p, n: torch.rand(n)}, ValueError, "decode: gave other bytes when it was called again$"),
        ({"granularity": 0}, ValueError, "granularity: expected 1 or more elements, got 0"),
        ({"granularity": 3.5}, TypeError, "granularity: expected an int, got float"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(changed: Any, kind: type[Exception], message: str) -> None:
    right = {"name": "mine", "encode": encode_bf16, "decode": decode_bf16, "wire_bytes": bf16_bytes}
    with pytest.raises(kind, match=f"^{message}"):
        codecs.custom(**{**right, **changed})
    assert not registry.REGISTERED


def test_other_functions_under_one_name_are_refused() -> None:
    codecs.custom("mine", encode_bf16, decode_bf16, bf16_bytes)
    with pytest.raises(ValueError, match="name: 'mine' is registered already, with other functions"):
        codecs.custom("mine", lambda x: encode_bf16(2 * x), decode_bf16, bf16_bytes)


def test_wrong_specs_are_explained() -> None:
    codecs.custom("natural", encode_bf16, decode_bf16, bf16_bytes)
    with pytest.raises(ValueError, match="natural: it takes no options, because it is written in Python"):
        codecs.codec("natural:block=3")
    with pytest.raises(
        ValueError, match=r"unknown codec 'natual' \(did you mean 'natural'\?\).*exact, natural"
    ):
        codecs.codec("natual")
    with pytest.raises(ValueError, match="op: min is valid with codecs none, fp16 and bf16, got natural"):
        dtcomm.collectives.checks.require_dtype("min", torch.float32, codecs.codec("natural"))


def truncated(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)


def test_the_fingerprint_tells_functions_apart() -> None:
    mine = codecs.custom("mine", encode_bf16, decode_bf16, bf16_bytes)
    same = codecs.custom("same", lambda x: encode_bf16(x), decode_bf16, bf16_bytes)
    cuts = codecs.custom("cuts", truncated, decode_bf16, bf16_bytes)  # fmt: skip
    assert mine.fingerprint == same.fingerprint != cuts.fingerprint
    assert mine.identity == f"mine (probe {mine.fingerprint:08x})"
    assert "0x" not in repr(mine)  # addresses differ on every rank


@functools.cache
def codec_like(name: str) -> codecs.PythonCodec:
    return python_codecs.register()[name]


def tensor_of(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


FLOATS = st.lists(
    st.one_of(st.floats(-10, 10, width=32), st.sampled_from(SPECIAL)), min_size=1, max_size=80
).map(tensor_of)


@settings(deadline=None, max_examples=60)
@given(
    x=FLOATS,
    repeats=st.sampled_from([1, 40]),
    name=st.sampled_from(["bf16", "int8"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    feedback=st.booleans(),
    divisor=st.sampled_from([1, 3]),
)
def test_every_verb_gives_the_bits_of_the_kernels(
    x: torch.Tensor, repeats: int, name: str, dtype: torch.dtype, feedback: bool, divisor: int
) -> None:
    """The codecs have the bytes of bf16 and int8, so every verb must give the same bits as with those."""
    mine = codec_like(name)
    x = x.repeat(repeats).to(dtype)
    n = x.numel()

    def results(codec: codecs.Codec) -> list[torch.Tensor]:
        residual = torch.linspace(-1, 1, n) if feedback else None
        decoded = torch.empty_like(x)
        payload = ops.encode(codec, x, residual=residual, decoded=decoded)
        out = ops.decode(codec, payload, n, dtype)
        total = ops.reduce(codec, [payload, payload], n, local=x, position=1, divisor=divisor, dtype=dtype)
        sum_residual = torch.linspace(-1, 1, n) if feedback else None
        sum_decoded = torch.empty(n, dtype=dtype)
        sum_payload = ops.reduce_encode(
            codec, [payload, payload], n, x, 1, divisor, sum_residual, dtype=dtype, decoded=sum_decoded
        )
        kept = [residual, sum_residual] if feedback else []
        return [decoded, payload, out, total, sum_payload, sum_decoded, *kept]  # type: ignore[list-item]

    for theirs, ours in zip(results(codecs.codec(name)), results(mine), strict=True):
        assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
        nan = theirs.isnan() if theirs.is_floating_point() else torch.zeros(theirs.shape, dtype=torch.bool)
        assert torch.equal(nan, ours.isnan())  # a NaN may have other bits: torch copies those of its operand
        assert torch.equal(
            torch.where(nan, 0, theirs).view(torch.uint8), torch.where(nan, 0, ours).view(torch.uint8)
        )


def test_a_key_makes_random_rounding_repeatable() -> None:
    codec = python_codecs.register()["scaled"]
    x = torch.randn(1000)
    first = dtcomm.encode(codec, x, key=1)
    assert torch.equal(first, dtcomm.encode(codec, x, key=1))
    assert not torch.equal(first, dtcomm.encode(codec, x, key=2))
    assert not torch.equal(first, dtcomm.encode(codec, x, key=1, offset=1000))
    mean = torch.stack([dtcomm.decode(codec, dtcomm.encode(codec, x, key=k), 1000) for k in range(400)]).mean(
        0
    )
    assert (
        mean - x
    ).abs().max() < 0.01  # a step is 0.03: nearest rounding would leave 0.015 of some elements


def test_feedback_conserves_what_was_sent() -> None:
    codec = python_codecs.register()["scaled"]
    x, residual, sent = torch.randn(500), torch.zeros(500), torch.zeros(500)
    for step in range(20):
        sent += dtcomm.decode(codec, dtcomm.encode(codec, x, key=step, residual=residual), 500)
    assert (sent + residual - 20 * x).abs().max() < 1e-4


def test_forced_kernels_do_not_apply() -> None:
    codec = python_codecs.register()["int8"]
    x = torch.randn(5000)
    expected = dtcomm.encode("int8", x)
    for name in kernels.available():
        with kernels.use(name):
            assert torch.equal(dtcomm.encode(codec, x), expected)


def test_quantize_and_compiled_code() -> None:
    codec = python_codecs.register()["int8"]
    x = torch.randn(3000, requires_grad=True)
    y = ops.quantize(codec, x)
    y.sum().backward()
    assert torch.equal(y, ops.quantize("int8", x)) and torch.equal(x.grad, torch.ones(3000))
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
        lambda x: dtcomm.decode("python_int8", dtcomm.encode("python_int8", x), 3000), backend="eager"
    )
    assert torch.equal(compiled(x.detach()), y.detach())


def test_what_needs_a_kernel_says_so() -> None:
    codec = python_codecs.register()["int8"]
    with pytest.raises(
        ValueError, match=r"codec: 'python_int8' is written in Python: it has no kernel .*simulated"
    ):
        codec.native()
    for algorithm in ("one_shot", "two_shot"):
        spec = OpSpec("all_reduce", "sum", (TensorSpec(4096, torch.float32, codec),), algorithm)
        assert why_not(spec, 2) == "codec python_int8 is written in Python, which no kernel calls"
    with pytest.raises(ValueError, match="topk: option 'values' is python_int8; valid: bf16, fp16"):
        codecs.codec("topk:values=python_int8")


def test_inference_tensors_are_written() -> None:
    codec = python_codecs.register()["int8"]
    with torch.inference_mode():
        out = torch.empty(100)
    x = torch.randn(100)
    ops.decode(codec, ops.encode(codec, x), 100, out=out)
    assert torch.equal(out, ops.decode("int8", ops.encode("int8", x), 100))
