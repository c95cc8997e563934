"""The places that a new codec family needs and that no compiler lists: these tests enumerate them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import dtcomm.codecs
from dtcomm import _C
from dtcomm.codecs import base, names
from dtcomm.codecs import codec as parse
from dtcomm.codecs.spec import CODECS
from dtcomm.compress.guard import _finer_codec
from dtcomm.kernels import reference

ROOT = Path(__file__).parents[3]


def numbers_of_families() -> set[int]:
    """The numbers of ``Family`` in csrc/codec/codec.h."""
    text = (ROOT / "csrc/codec/codec.h").read_text()
    members = re.search(r"enum class Family[^{]*\{(.*?)\}", text, re.DOTALL)
    assert members is not None
    return {int(number) for number in re.findall(r"= (\d+)", members[1])}


def test_every_family_has_a_class_a_name_in_the_fuzzer_and_a_number_without_gaps() -> None:
    known = numbers_of_families()
    assert known == {parse(name).family for name in CODECS} == set(range(len(known)))
    fuzzer = (ROOT / "csrc/tests/fuzz_payloads.h").read_text()
    assert f"kFamilies = {len(known)};" in fuzzer


def test_kernels_refuse_a_family_that_they_do_not_know() -> None:
    payload, x = torch.zeros(64, dtype=torch.uint8), torch.ones(8)
    for family in sorted(set(range(256)) - numbers_of_families()):
        unknown = base.pack(family, block=32, bits=4)
        with pytest.raises(ValueError, match="family"):
            _C.wire_bytes(unknown, 8, 0)
        with pytest.raises(ValueError, match="family"):
            _C.decode("generic", unknown, payload.data_ptr(), 8, 0, x.data_ptr(), 0, False)
    assert x.tolist() == [1.0] * 8


@pytest.mark.parametrize("name", names())
def test_every_codec_is_exported_and_has_a_reference(name: str) -> None:
    codec = parse(name)
    assert getattr(dtcomm.codecs, type(codec).__name__) is type(codec)
    assert codec.elementwise or codec.reference in reference._MODULES


@pytest.mark.parametrize("name", [name for name in names() if not parse(name).reproducible])
def test_the_guard_falls_back_to_a_codec_that_sends_no_fewer_bytes(name: str) -> None:
    codec = parse(name)
    assert _finer_codec(codec).wire_bytes(1 << 16) >= codec.wire_bytes(1 << 16)


def test_granules_are_the_same_in_both_languages() -> None:
    text = (ROOT / "csrc/codec/granules.h").read_text()
    numbers = dict(re.findall(r"\b(k\w*Granule) = (\d+)", text))
    assert int(numbers["kGranule"]) == base.GRANULE == base.VALUE_GRANULE
    assert int(numbers["kSparseGranule"]) == base.SPARSE_GRANULE
    assert int(numbers["kNvfp4Granule"]) == base.NVFP4_GRANULE
    assert int(numbers["kLosslessGranule"]) == base.LOSSLESS_GRANULE
    for name in CODECS:
        assert _C.granule_elements(parse(name).native()) == parse(name).granularity
