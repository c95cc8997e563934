"""Any alignment, streamed or not, gives the same bytes, and nothing outside the arguments is touched."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.codecs.cases import codecs_with_single_changes, covering
from tests.unit.kernels.inputs import floats

FAST = [name for name in available() if name != "reference"]
GUARD = 0xA5
SKEWS = (0, 1, 4, 20, 63)  # bytes past a line
BOTH_STREAMS = tuple(itertools.product((False, True), repeat=2))  # of the payload, and of the floats


class GuardedMemory:
    """Bytes at a chosen distance from a 64-byte line, with guards on both sides."""

    def __init__(self, size: int, skew: int, content: torch.Tensor | None = None) -> None:
        self.memory = torch.full((size + 512,), GUARD, dtype=torch.uint8)
        self.start = -self.memory.data_ptr() % 64 + 128 + skew
        self.bytes = self.memory[self.start : self.start + size]
        if content is not None:
            self.bytes.copy_(content.reshape(-1).view(torch.uint8))

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def intact(self) -> bool:
        outside = torch.cat([self.memory[: self.start], self.memory[self.start + len(self.bytes) :]])
        return bool((outside == GUARD).all())


def combine(
    kernel: str,
    which: Codec,
    dtype: torch.dtype,
    n: int,
    *,
    payloads: list[GuardedMemory],
    position: int = 0,
    local: GuardedMemory | None = None,
    residual_in: GuardedMemory | None = None,
    residual_out: GuardedMemory | None = None,
    payload_out: GuardedMemory | None = None,
    out: GuardedMemory | None = None,
    out_dtype: torch.dtype | None = None,
    divisor: int = 1,
    stream: tuple[bool, bool] = (False, False),
) -> None:
    areas = (local, residual_in, residual_out, payload_out, out)
    local_at, in_at, out_at, payload_at, floats_at = (0 if area is None else area.address for area in areas)
    kind = ELEMENT_TYPES[dtype]
    _C.combine(
        kernel,
        which.native(),
        [payload.address for payload in payloads],
        position,
        local_at,
        kind,
        in_at,
        out_at,
        n,
        divisor,
        0,
        5,
        3,
        payload_at,
        floats_at,
        kind,
        ELEMENT_TYPES[out_dtype or dtype],
        *stream,
    )


@cache
def pairs(turn: int, *axes: Sequence[object]) -> list[Any]:
    """Rows of a kernel and a value of each axis, in which every pair of values occurs.

    The kernels take turns: over as many turns as there are kernels every combination of two axes meets each kernel.
    """
    turn %= len(FAST)
    return covering([FAST[turn:] + FAST[:turn], *axes])


@pytest.mark.parametrize("codec", codecs_with_single_changes(), ids=str)
def test_alignment_and_streaming(codec: Codec) -> None:
    sizes = (1, 33, 1024, 2 * codec.granularity + 77)
    for turn, (n, dtype) in enumerate(itertools.product(sizes, (torch.float32, torch.bfloat16))):
        x, y = (floats("nonfinite", n, seed=seed).to(dtype) for seed in (1, 2))
        old = floats("normal", n, seed=3)
        with use("reference"):
            p = encode(codec, x)
            summed = reduce(codec, [p, p], n, y, 1, 3)
            residual, decoded = old.clone(), torch.empty_like(x)
            q = reduce_encode(codec, [p, p], n, y, 1, 3, residual, key=5, offset=3, decoded=decoded)
        size = n * dtype.itemsize
        for kernel, skew, stream in pairs(turn, SKEWS, BOTH_STREAMS):
            other = SKEWS[SKEWS.index(skew) - 2]
            payloads = [GuardedMemory(len(p), skew, p), GuardedMemory(len(p), other, p)]
            local = GuardedMemory(size, other, y)
            out = GuardedMemory(size, skew)
            combine(
                kernel, codec, dtype, n, payloads=payloads, position=1, local=local, out=out, divisor=3, stream=stream
            )  # fmt: skip
            assert out.intact() and torch.equal(out.bytes, summed.view(torch.uint8)), kernel

            error, wire, out = (
                GuardedMemory(4 * n, other, old),
                GuardedMemory(len(q), skew),
                GuardedMemory(size, other),
            )
            combine(
                kernel, codec, dtype, n, payloads=payloads, position=1, local=local, residual_in=error,
                residual_out=error, payload_out=wire, out=out, divisor=3, stream=stream,
            )  # fmt: skip
            assert wire.intact() and torch.equal(wire.bytes, q), kernel
            assert error.intact() and torch.equal(error.bytes, residual.view(torch.uint8)), kernel
            assert out.intact() and torch.equal(out.bytes, decoded.view(torch.uint8)), kernel


@pytest.mark.parametrize("codec", codecs_with_single_changes(), ids=str)
def test_calls_that_write_only_a_payload(codec: Codec) -> None:
    """Their stores may bypass the cache, as nothing is read back; some vectors have NaN and some have none."""
    sizes = (1, 33, 1024, 3 * codec.granularity + 77)
    for turn, (n, dtype) in enumerate(itertools.product(sizes, (torch.float32, torch.float16))):
        x = floats("nonfinite", n, seed=1).to(dtype)
        with use("reference"):
            alone = encode(codec, x, 5, 3)
            summed = reduce_encode(codec, [alone], n, x, key=5, offset=3)
        for kernel, skew, streamed in pairs(turn, SKEWS, (False, True)):
            local, payload = GuardedMemory(n * dtype.itemsize, 0, x), GuardedMemory(len(alone), 0, alone)
            for expected, terms in ((alone, []), (summed, [payload])):
                wire = GuardedMemory(len(expected), skew)
                combine(
                    kernel, codec, dtype, n, payloads=terms, position=len(terms), local=local, payload_out=wire,
                    stream=(streamed, False),
                )  # fmt: skip
                assert wire.intact() and torch.equal(wire.bytes, expected), kernel


@pytest.mark.parametrize("codec", codecs_with_single_changes(), ids=str)
def test_fast_paths_of_two_payload_sums_and_residual_encoding(codec: Codec) -> None:
    """The sum of two payloads without a local term, and an encoding that also writes its residual."""
    for turn, n in enumerate((1, 33, 1024, 2 * codec.granularity + 77)):
        x, old = floats("nonfinite", n, seed=1), floats("normal", n, seed=2)
        with use("reference"):
            p, q = encode(codec, x, 5, 3), encode(codec, floats("blocks_apart", n, seed=4))
            summed = reduce(codec, [p, q], n)
            residual = old.clone()
            alone = encode(codec, x, 5, 3, residual)
        for kernel, skew, streamed in pairs(turn, SKEWS, (False, True)):
            out, stream = GuardedMemory(4 * n, skew), (streamed, streamed)
            payloads = [GuardedMemory(len(p), 1, p), GuardedMemory(len(q), skew, q)]
            combine(kernel, codec, torch.float32, n, payloads=payloads, position=2, out=out, stream=stream)
            assert out.intact() and torch.equal(out.bytes, summed.view(torch.uint8)), kernel

            local, wire = GuardedMemory(4 * n, 4, x), GuardedMemory(len(alone), skew)
            before, after = GuardedMemory(4 * n, 1, old), GuardedMemory(4 * n, skew)
            combine(
                kernel, codec, torch.float32, n, payloads=[], local=local, residual_in=before, residual_out=after,
                payload_out=wire, stream=stream,
            )  # fmt: skip
            assert wire.intact() and torch.equal(wire.bytes, alone), kernel
            assert after.intact() and torch.equal(after.bytes, residual.view(torch.uint8)), kernel


@pytest.mark.parametrize("codec", codecs_with_single_changes(), ids=str)
def test_decoding_at_any_alignment(codec: Codec) -> None:
    for turn, n in enumerate((1, 33, 1024, 2 * codec.granularity + 77)):
        p = encode(codec, floats("blocks_apart", n))
        with use("reference"):
            expected = decode(codec, p, n)
        for kernel, skew, stream in pairs(turn, SKEWS, (False, True)):
            payload, out = GuardedMemory(len(p), SKEWS[1], p), GuardedMemory(4 * n, skew)
            _C.decode(kernel, codec.native(), payload.address, n, 0, out.address, 0, stream)
            assert out.intact() and torch.equal(out.bytes, expected.view(torch.uint8)), kernel


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("terms", range(2, 11))
def test_sums_of_up_to_many_uncompressed_terms(kernel: str, terms: int) -> None:
    """The fast path of `none` (2 to 8 terms), and more terms."""
    none, n = parse("none"), 3001
    values = [floats("nonfinite", n, seed=seed) for seed in range(terms)]
    wires = [encode(none, value) for value in values]
    with use("reference"):
        expected = reduce(none, wires[1:], n, values[0], 1, 3)
    for skews, stream in itertools.product(
        ((0, 0), (0, 4), (20, 20), (4, 1)), ((0, 0), (1, 0), (0, 1), (1, 1))
    ):
        local, out = GuardedMemory(4 * n, 1, values[0]), GuardedMemory(4 * n, skews[0])
        payloads = [GuardedMemory(len(wire), skews[1], wire) for wire in wires[1:]]
        wire = GuardedMemory(none.wire_bytes(n), skews[1])
        combine(
            kernel, none, torch.float32, n, payloads=payloads, position=1, local=local, payload_out=wire, out=out,
            divisor=3, stream=(bool(stream[0]), bool(stream[1])),
        )  # fmt: skip
        assert out.intact() and torch.equal(out.bytes, expected.view(torch.uint8))
        assert wire.intact() and torch.equal(wire.bytes[: 4 * n], out.bytes)
        assert not wire.bytes[4 * n :].any()


@pytest.mark.parametrize("codec", codecs_with_single_changes(), ids=str)
def test_out_may_be_local(codec: Codec) -> None:
    n = codec.granularity + 5
    x, other = floats("normal", n), encode(codec, floats("normal", n, seed=5))
    with use("reference"):
        summed = reduce(codec, [other], n, x)
        decoded, alone = torch.empty(n), torch.empty(n)
        wire = reduce_encode(codec, [other], n, x, decoded=decoded, key=5, offset=3)
        lone_wire = encode(codec, x, 5, 3, decoded=alone)
    for kernel, stream in itertools.product(FAST, BOTH_STREAMS):
        for expected, expected_wire, terms in (
            (summed, None, [other]),
            (decoded, wire, [other]),
            (alone, lone_wire, []),
        ):
            area, payload = GuardedMemory(4 * n, 0, x), GuardedMemory(len(wire), 0)
            combine(
                kernel, codec, torch.float32, n, payloads=[GuardedMemory(len(term), 0, term) for term in terms],
                position=len(terms), local=area, out=area, stream=stream,
                payload_out=None if expected_wire is None else payload,
            )  # fmt: skip
            assert area.intact() and torch.equal(area.bytes, expected.view(torch.uint8)), kernel
            assert expected_wire is None or torch.equal(payload.bytes, expected_wire), kernel


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("spec", ["int8", "int4:rotate=hadamard,spikes=1"])
def test_residual_in_and_residual_out_may_differ(spec: str, kernel: str) -> None:
    """Covers residual_in without local, both in separate memory, and residual_out alone."""
    codec, n = parse(spec), 1100
    old, x = floats("normal", n, seed=1), floats("nonfinite", n, seed=2)
    with use("reference"):
        expected = old.clone()
        p = encode(codec, x, 5, 3, residual=expected)
    separate, wire = GuardedMemory(4 * n, 4), GuardedMemory(len(p), 0)
    combine(
        kernel, codec, torch.float32, n, payloads=[], local=GuardedMemory(4 * n, 0, x),
        residual_in=GuardedMemory(4 * n, 0, old), residual_out=separate, payload_out=wire,
    )  # fmt: skip
    assert torch.equal(wire.bytes, p) and torch.equal(separate.bytes, expected.view(torch.uint8))

    error, wire = GuardedMemory(4 * n, 0), GuardedMemory(len(p), 0)
    combine(kernel, codec, torch.float32, n, payloads=[], residual_in=GuardedMemory(4 * n, 0, old), residual_out=error,
            payload_out=wire)  # fmt: skip
    assert torch.equal(wire.bytes, encode(codec, old, 5, 3))
    expected_residual = old.clone()
    encode(codec, torch.zeros(n), 5, 3, residual=expected_residual)
    assert torch.equal(error.bytes.view(torch.float32), expected_residual)
    assert torch.allclose(expected_residual, old - decode(codec, wire.bytes, n), rtol=0, atol=1e-6)

    partial = GuardedMemory(4 * n, 0, old)
    combine(
        kernel,
        codec,
        torch.float32,
        n,
        payloads=[],
        local=GuardedMemory(4 * n, 0, x),
        residual_out=partial,
        payload_out=wire,
    )
    bad = ~decode(codec, encode(codec, x), n).isfinite()
    assert bad.any() and torch.equal(partial.bytes.view(torch.float32)[bad], old[bad])

    consumed = GuardedMemory(4 * n, 0, old)
    combine(kernel, codec, torch.float32, n, payloads=[], local=GuardedMemory(4 * n, 0, x), residual_in=consumed,
            residual_out=consumed, out=GuardedMemory(4 * n, 0))  # fmt: skip
    assert not consumed.bytes.any()
