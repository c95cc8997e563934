"""Payload sizes: granules back to back, independent of the data, the same in Python and C++."""

from __future__ import annotations

import pytest
import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES, FLOAT_TYPES
from tests.unit.codecs.cases import codecs_with_option_sets, codecs_with_single_changes

SIZES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 100_003)


@pytest.mark.parametrize("codec", codecs_with_option_sets(), ids=str)
def test_native_sizes_equal_those_of_python(codec: Codec) -> None:
    assert len(codec.native()) == 16
    assert _C.granule_elements(codec.native()) == codec.granularity
    for dtype in codec.dtypes:
        for numel in SIZES:
            assert _C.wire_bytes(codec.native(), numel, ELEMENT_TYPES[dtype]) == codec.wire_bytes(
                numel, dtype
            )


@pytest.mark.parametrize("codec", codecs_with_option_sets(), ids=str)
def test_a_payload_may_be_cut_at_granules(codec: Codec) -> None:
    for dtype in codec.dtypes:
        for numel in SIZES:
            for granules in (1, 3):
                head = granules * codec.granularity
                whole = codec.wire_bytes(head + numel, dtype)
                assert whole == codec.wire_bytes(head, dtype) + codec.wire_bytes(numel, dtype)


@pytest.mark.parametrize("codec", codecs_with_option_sets(), ids=str)
def test_sizes_are_multiples_of_16_and_grow(codec: Codec) -> None:
    sizes = [codec.wire_bytes(numel) for numel in range(0, 3000, 7)]
    assert all(size % 16 == 0 for size in sizes)
    assert sizes == sorted(sizes) and sizes[0] == 0


@pytest.mark.parametrize("codec", codecs_with_single_changes(), ids=str)
def test_only_none_has_sizes_that_depend_on_the_type(codec: Codec) -> None:
    sizes = {codec.wire_bytes(1000, dtype) for dtype in FLOAT_TYPES}
    assert len(sizes) == (2 if codec.name == "none" else 1)


@pytest.mark.parametrize(
    ("spec", "numel", "expected"),
    [
        ("none", 1024, 4096),
        ("none", 5, 32),
        ("fp16", 1024, 2048),
        ("bf16", 9, 32),
        ("int8", 1024, 1024 + 64),  # 32 scales of 2 bytes
        ("int8", 1, 48),  # one block: 2 + 32, padded
        ("int8", 1025, 1088 + 48),
        ("int8:scale=fp32", 1024, 1024 + 128),
        ("int8:symmetric=false", 1024, 1024 + 128),
        ("int8:block=4096", 4096, 4096 + 16),
        ("int8:block=4096", 1, 4096 + 16),
        ("int8:block=1024", 1024, 1024 + 16),
        ("topk", 4096, 41 * 2 + 62),  # bf16, then 41 positions of 12 bits: 144
        ("topk", 1, 16),
        ("topk:ratio=0.0001", 4096, 16),  # at least one
        ("topk:ratio=0.05", 4096, 205 * 2 + 308 + 2),
        ("topk:ratio=0.0833", 4096, 341 * 2 + 512 + 6),
        ("topk:ratio=0.0835", 4096, 342 * 2 + 512 + 4),  # a bitmap, now no longer than a list
        ("topk:ratio=1", 4097, 8192 + 512 + 16),
        ("topk:values=int8", 4096, 2 * 2 + 64 + 62 + 14),  # two blocks of 32
        ("randk", 4096, 8 + 41 * 2 + 6),
        ("randk:ratio=1,values=int8", 4096, 8 + 4 * 1088 + 8),
    ],
)
def test_known_sizes(spec: str, numel: int, expected: int) -> None:
    assert parse(spec).wire_bytes(numel) == expected


def test_none_takes_every_type() -> None:
    assert [parse("none").wire_bytes(16, dtype) for dtype in (torch.bool, torch.int64)] == [16, 128]
    with pytest.raises(TypeError, match=r"complex64.*float32, float16"):
        parse("none").wire_bytes(16, torch.complex64)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="numel: expected 0 or more, got -1"):
        parse("int8").wire_bytes(-1)
    for wrong in (1.0, True, "1"):
        with pytest.raises(TypeError, match="numel"):
            parse("int8").wire_bytes(wrong)  # type: ignore[arg-type]


def test_codecs_are_lossless_for_their_own_type() -> None:
    assert parse("none").lossless(torch.float64)
    assert parse("fp16").lossless(torch.float16) and not parse("fp16").lossless(torch.bfloat16)
    assert parse("bf16").lossless(torch.bfloat16) and not parse("bf16").lossless(torch.float32)
    assert not parse("int8").lossless(torch.float16)


@pytest.mark.parametrize("length", [0, 12, 15, 17])
def test_the_native_core_refuses_codecs_of_another_length(length: int) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        _C.granule_elements(bytes(length))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 99, "family"),
        (1, 9, "bits"),
        (2, 2, "scale"),
        (3, 2, "symmetric"),
        (5, 2, "rotate"),
        (6, 2, "spikes"),
        (8, 33, "block"),
        (12, 1, "sparse"),
    ],
)
def test_the_native_core_refuses_unknown_fields(at: int, value: int, message: str) -> None:
    wrong = bytearray(parse("int8").native())
    wrong[at] = value
    with pytest.raises(ValueError, match=message):
        _C.granule_elements(bytes(wrong))
