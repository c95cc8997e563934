"""Bytes that no encoder wrote: refused by their length, or decoded alike by every kernel and by the reference.

csrc/tests/fuzz_payloads.cpp does the same by the million, at guard pages and under sanitizers, for the kernels in C++.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES, LARGEST_BLOCK
from dtcomm.errors import PayloadCorrupt
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.codecs.cases import codecs_with_option_sets, codecs_with_single_changes

F32 = ELEMENT_TYPES[torch.float32]
LENGTHS = st.integers(1, 2500)


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


@settings(max_examples=100, deadline=None)
@given(
    codec=st.sampled_from(codecs_with_single_changes()),
    numel=st.just(0) | LENGTHS,
    error=st.integers(-5000, 5000).filter(bool),
)
def test_payloads_of_another_length_are_refused_by_name(codec: Codec, numel: int, error: int) -> None:
    right = codec.wire_bytes(numel)
    wrong = torch.zeros(max(0, right + error), dtype=torch.uint8)
    if len(wrong) == right:
        return
    good = torch.zeros(right, dtype=torch.uint8)
    x = torch.zeros(numel)
    before = torch.full((numel,), 7.0)
    out, residual = before.clone(), before.clone()
    message = f"{numel} elements in codec '{codec}' are {right} bytes, got {len(wrong)}"
    calls: list[tuple[str, Callable[[], object]]] = [
        ("payload", lambda: decode(codec, wrong, numel, out=out)),
        ("payloads[1]", lambda: reduce(codec, [good, wrong], numel, x, out=out)),
        ("payloads[0]", lambda: reduce_encode(codec, [wrong], numel, x, residual=residual)),
        ("out", lambda: encode(codec, x, residual=residual, out=wrong)),
        ("out", lambda: reduce_encode(codec, [good], numel, x, residual=residual, out=wrong)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError) as refused:
            call()
        assert str(refused.value) == f"{name}: {message}"
    assert torch.equal(out, before) and torch.equal(residual, before) and not wrong.any()


@settings(max_examples=200, deadline=None)
@given(
    codec=st.sampled_from(codecs_with_option_sets()),
    numel=st.integers(1, 300) | LENGTHS,
    seed=st.integers(0, 2**32),
)
def test_kernels_agree_on_decoding_or_refusing_random_payloads(codec: Codec, numel: int, seed: int) -> None:
    wire = random_bytes(codec.wire_bytes(numel), seed)
    results = {name: _outcome(name, lambda: decode(codec, wire, numel)) for name in available()}
    assert all(outcome == results["reference"] for outcome in results.values())


@settings(max_examples=100, deadline=None)
@given(
    codec=st.sampled_from(codecs_with_option_sets()),
    numel=st.integers(1, 300) | LENGTHS,
    seed=st.integers(0, 2**32),
    flips=st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 7)), max_size=3),
)
def test_kernels_agree_on_summing_or_refusing_damaged_payloads(
    codec: Codec, numel: int, seed: int, flips: list[tuple[int, int]]
) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    wire = encode(codec, x, key=seed)
    for place, bit in flips:
        wire[place % len(wire)] ^= 1 << bit
    results = {
        name: (
            _outcome(name, lambda: reduce(codec, [wire, wire], numel, x, 1, 3)),
            _outcome(name, lambda: reduce_encode(codec, [wire], numel, x, 0, key=seed)),
        )
        for name in available()
    }
    assert all(outcome == results["reference"] for outcome in results.values())


def _outcome(kernel: str, call: Callable[[], torch.Tensor]) -> bytes | str:
    """Return the bytes of the result, or the refusal."""
    with use(kernel):
        try:
            return call().view(torch.uint8).numpy().tobytes()
        except PayloadCorrupt:
            return "PayloadCorrupt"


fields = st.tuples(
    *(st.integers(0, most) | st.integers(0, 255) for most in (9, 9, 2, 2, 2, 2, 2, 8)),
    st.sampled_from([0, 1, 16, 32, 128, 4096, 8192, 48]) | st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 41, 4096, 4097]) | st.integers(0, 2**32 - 1),
)


@settings(max_examples=500, deadline=None)
@given(raw=st.binary(min_size=16, max_size=16) | fields.map(lambda values: struct.pack("<8B2I", *values)))
@example(raw=bytes(16))
@example(raw=bytes([255]) * 16)
def test_arbitrary_codec_bytes_are_refused_or_decoded_alike(raw: bytes) -> None:
    """With accepted bytes, every kernel decodes a random payload to the same floats."""
    try:
        granule = _C.granule_elements(raw)
    except ValueError as refused:
        assert "codec" in str(refused)
        with pytest.raises(ValueError, match="codec"):
            _C.wire_bytes(raw, 100, F32)
        return
    assert 1 <= granule <= LARGEST_BLOCK
    sizes = [_C.wire_bytes(raw, numel, F32) for numel in (0, 1, granule, granule + 1)]
    assert sizes[0] == 0 < sizes[1] <= sizes[2] and sizes[3] == sizes[1] + sizes[2]
    wire, outs = random_bytes(sizes[3], raw[0]), []
    for name in available()[:-1]:  # the last one is the reference
        out = torch.empty(granule + 1)
        _C.decode(name, raw, wire.data_ptr(), granule + 1, F32, out.data_ptr(), F32, False)
        outs.append(out.view(torch.int32))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("codec", codecs_with_option_sets(), ids=str)
def test_native_and_text_forms_of_a_codec_agree(codec: Codec) -> None:
    assert _C.granule_elements(codec.native()) == codec.granularity
    assert parse(str(codec)).native() == codec.native()
