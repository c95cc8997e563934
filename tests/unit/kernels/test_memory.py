"""Any alignment, streamed or not, gives the same bytes, and nothing outside the arguments is touched."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from dtcomm import _C
from dtcomm.codecs import Codec, codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.codecs.cases import covering, few
from tests.unit.kernels.inputs import floats

FAST = [name for name in available() if name != "reference"]
GUARD = 0xA5
SKEWS = (0, 1, 4, 20, 63)  # bytes past a line
BOTH_STREAMS = tuple(itertools.product((False, True), repeat=2))  # of the payload, and of the floats


class Room:
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
    payloads: list[Room],
    position: int = 0,
    local: Room | None = None,
    residual_in: Room | None = None,
    residual_out: Room | None = None,
    payload_out: Room | None = None,
    out: Room | None = None,
    out_dtype: torch.dtype | None = None,
    divisor: int = 1,
    stream: tuple[bool, bool] = (False, False),
) -> None:
    rooms = (local, residual_in, residual_out, payload_out, out)
    local_at, in_at, out_at, payload_at, floats_at = (0 if room is None else room.address for room in rooms)
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


@pytest.mark.parametrize("each", few(), ids=str)
def test_alignment_and_streaming(each: Codec) -> None:
    sizes = (1, 33, 1024, 2 * each.granularity + 77)
    for turn, (n, dtype) in enumerate(itertools.product(sizes, (torch.float32, torch.bfloat16))):
        x, y = (floats("nonfinite", n, seed=seed).to(dtype) for seed in (1, 2))
        old = floats("normal", n, seed=3)
        with use("reference"):
            p = encode(each, x)
            summed = reduce(each, [p, p], n, y, 1, 3)
            residual, decoded = old.clone(), torch.empty_like(x)
            q = reduce_encode(each, [p, p], n, y, 1, 3, residual, key=5, offset=3, decoded=decoded)
        size = n * dtype.itemsize
        for kernel, skew, stream in pairs(turn, SKEWS, BOTH_STREAMS):
            other = SKEWS[SKEWS.index(skew) - 2]
            payloads = [Room(len(p), skew, p), Room(len(p), other, p)]
            local = Room(size, other, y)
            out = Room(size, skew)
            combine(
                kernel, each, dtype, n, payloads=payloads, position=1, local=local, out=out, divisor=3, stream=stream
            )  # fmt: skip
            assert out.intact() and torch.equal(out.bytes, summed.view(torch.uint8)), kernel

            error, wire, out = Room(4 * n, other, old), Room(len(q), skew), Room(size, other)
            combine(
                kernel, each, dtype, n, payloads=payloads, position=1, local=local, residual_in=error,
                residual_out=error, payload_out=wire, out=out, divisor=3, stream=stream,
            )  # fmt: skip
            assert wire.intact() and torch.equal(wire.bytes, q), kernel
            assert error.intact() and torch.equal(error.bytes, residual.view(torch.uint8)), kernel
            assert out.intact() and torch.equal(out.bytes, decoded.view(torch.uint8)), kernel


@pytest.mark.parametrize("each", few(), ids=str)
def test_a_payload_and_nothing_else(each: Codec) -> None:
    """What may go straight past the cache, as nothing is read back; with NaN in some vectors and not in others."""
    sizes = (1, 33, 1024, 3 * each.granularity + 77)
    for turn, (n, dtype) in enumerate(itertools.product(sizes, (torch.float32, torch.float16))):
        x = floats("nonfinite", n, seed=1).to(dtype)
        with use("reference"):
            alone = encode(each, x, 5, 3)
            summed = reduce_encode(each, [alone], n, x, key=5, offset=3)
        for kernel, skew, streamed in pairs(turn, SKEWS, (False, True)):
            local, payload = Room(n * dtype.itemsize, 0, x), Room(len(alone), 0, alone)
            for expected, terms in ((alone, []), (summed, [payload])):
                wire = Room(len(expected), skew)
                combine(
                    kernel, each, dtype, n, payloads=terms, position=len(terms), local=local, payload_out=wire,
                    stream=(streamed, False),
                )  # fmt: skip
                assert wire.intact() and torch.equal(wire.bytes, expected), kernel


@pytest.mark.parametrize("each", few(), ids=str)
def test_shorter_ways(each: Codec) -> None:
    """The sum of two payloads and nothing else; an encoding of which only the residual is wanted besides."""
    for turn, n in enumerate((1, 33, 1024, 2 * each.granularity + 77)):
        x, old = floats("nonfinite", n, seed=1), floats("normal", n, seed=2)
        with use("reference"):
            p, q = encode(each, x, 5, 3), encode(each, floats("blocks_apart", n, seed=4))
            summed = reduce(each, [p, q], n)
            residual = old.clone()
            alone = encode(each, x, 5, 3, residual)
        for kernel, skew, streamed in pairs(turn, SKEWS, (False, True)):
            out, stream = Room(4 * n, skew), (streamed, streamed)
            payloads = [Room(len(p), 1, p), Room(len(q), skew, q)]
            combine(kernel, each, torch.float32, n, payloads=payloads, position=2, out=out, stream=stream)
            assert out.intact() and torch.equal(out.bytes, summed.view(torch.uint8)), kernel

            local, wire = Room(4 * n, 4, x), Room(len(alone), skew)
            before, after = Room(4 * n, 1, old), Room(4 * n, skew)
            combine(
                kernel, each, torch.float32, n, payloads=[], local=local, residual_in=before, residual_out=after,
                payload_out=wire, stream=stream,
            )  # fmt: skip
            assert wire.intact() and torch.equal(wire.bytes, alone), kernel
            assert after.intact() and torch.equal(after.bytes, residual.view(torch.uint8)), kernel


@pytest.mark.parametrize("each", few(), ids=str)
def test_decoding(each: Codec) -> None:
    for turn, n in enumerate((1, 33, 1024, 2 * each.granularity + 77)):
        p = encode(each, floats("blocks_apart", n))
        with use("reference"):
            expected = decode(each, p, n)
        for kernel, skew, stream in pairs(turn, SKEWS, (False, True)):
            payload, out = Room(len(p), SKEWS[1], p), Room(4 * n, skew)
            _C.decode(kernel, each.native(), payload.address, n, 0, out.address, 0, stream)
            assert out.intact() and torch.equal(out.bytes, expected.view(torch.uint8)), kernel


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("terms", range(2, 11))
def test_plain_sums_of_many(kernel: str, terms: int) -> None:
    """The fast path of `none` (2 to 8 terms), and what lies beyond it."""
    none, n = codec("none"), 3001
    values = [floats("nonfinite", n, seed=seed) for seed in range(terms)]
    wires = [encode(none, value) for value in values]
    with use("reference"):
        expected = reduce(none, wires[1:], n, values[0], 1, 3)
    for skews, stream in itertools.product(
        ((0, 0), (0, 4), (20, 20), (4, 1)), ((0, 0), (1, 0), (0, 1), (1, 1))
    ):
        local, out = Room(4 * n, 1, values[0]), Room(4 * n, skews[0])
        payloads = [Room(len(wire), skews[1], wire) for wire in wires[1:]]
        wire = Room(none.wire_bytes(n), skews[1])
        combine(
            kernel, none, torch.float32, n, payloads=payloads, position=1, local=local, payload_out=wire, out=out,
            divisor=3, stream=(bool(stream[0]), bool(stream[1])),
        )  # fmt: skip
        assert out.intact() and torch.equal(out.bytes, expected.view(torch.uint8))
        assert wire.intact() and torch.equal(wire.bytes[: 4 * n], out.bytes)
        assert not wire.bytes[4 * n :].any()


@pytest.mark.parametrize("each", few(), ids=str)
def test_out_may_be_local(each: Codec) -> None:
    n = each.granularity + 5
    x, other = floats("normal", n), encode(each, floats("normal", n, seed=5))
    with use("reference"):
        summed = reduce(each, [other], n, x)
        decoded, alone = torch.empty(n), torch.empty(n)
        wire = reduce_encode(each, [other], n, x, decoded=decoded, key=5, offset=3)
        lone_wire = encode(each, x, 5, 3, decoded=alone)
    for kernel, stream in itertools.product(FAST, BOTH_STREAMS):
        for expected, expected_wire, terms in (
            (summed, None, [other]),
            (decoded, wire, [other]),
            (alone, lone_wire, []),
        ):
            room, payload = Room(4 * n, 0, x), Room(len(wire), 0)
            combine(
                kernel, each, torch.float32, n, payloads=[Room(len(term), 0, term) for term in terms],
                position=len(terms), local=room, out=room, stream=stream,
                payload_out=None if expected_wire is None else payload,
            )  # fmt: skip
            assert room.intact() and torch.equal(room.bytes, expected.view(torch.uint8)), kernel
            assert expected_wire is None or torch.equal(payload.bytes, expected_wire), kernel


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("spec", ["int8", "int4:rotate=hadamard,spikes=1"])
def test_residuals_apart(spec: str, kernel: str) -> None:
    """residual_in without local; residual_out elsewhere; residual_out alone keeps what it cannot replace."""
    each, n = codec(spec), 1100
    old, x = floats("normal", n, seed=1), floats("nonfinite", n, seed=2)
    with use("reference"):
        expected = old.clone()
        p = encode(each, x, 5, 3, residual=expected)
    fresh, wire = Room(4 * n, 4), Room(len(p), 0)
    combine(
        kernel, each, torch.float32, n, payloads=[], local=Room(4 * n, 0, x), residual_in=Room(4 * n, 0, old),
        residual_out=fresh, payload_out=wire,
    )  # fmt: skip
    assert torch.equal(wire.bytes, p) and torch.equal(fresh.bytes, expected.view(torch.uint8))

    alone, wire = Room(4 * n, 0), Room(len(p), 0)
    combine(kernel, each, torch.float32, n, payloads=[], residual_in=Room(4 * n, 0, old), residual_out=alone,
            payload_out=wire)  # fmt: skip
    assert torch.equal(wire.bytes, encode(each, old, 5, 3))
    lost = old.clone()
    encode(each, torch.zeros(n), 5, 3, residual=lost)
    assert torch.equal(alone.bytes.view(torch.float32), lost)
    assert torch.allclose(lost, old - decode(each, wire.bytes, n), rtol=0, atol=1e-6)

    kept = Room(4 * n, 0, old)
    combine(
        kernel,
        each,
        torch.float32,
        n,
        payloads=[],
        local=Room(4 * n, 0, x),
        residual_out=kept,
        payload_out=wire,
    )
    bad = ~decode(each, encode(each, x), n).isfinite()
    assert bad.any() and torch.equal(kept.bytes.view(torch.float32)[bad], old[bad])

    gone = Room(4 * n, 0, old)
    combine(kernel, each, torch.float32, n, payloads=[], local=Room(4 * n, 0, x), residual_in=gone,
            residual_out=gone, out=Room(4 * n, 0))  # fmt: skip
    assert not gone.bytes.any()
