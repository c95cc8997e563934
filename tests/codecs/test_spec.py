"""Specs and codecs are two forms of one value; a wrong spec says what is wrong and what is valid."""

from __future__ import annotations

import dataclasses

import pytest

from dtcomm.codecs import Codec, codec, names
from dtcomm.codecs.base import LARGEST_BLOCK, SMALLEST_BLOCK
from dtcomm.codecs.spec import CODECS
from tests.codecs.cases import VALUES, everything


@pytest.mark.parametrize("each", everything(), ids=str)
def test_a_spec_parses_back(each: Codec) -> None:
    assert codec(str(each)) == each
    assert hash(codec(str(each))) == hash(each)
    assert codec(each) is each


@pytest.mark.parametrize("name", names())
def test_a_default_prints_as_its_name(name: str) -> None:
    assert str(codec(name)) == name == codec(name).name


@pytest.mark.parametrize("name", names())
def test_every_option_has_values_to_test(name: str) -> None:
    for option, field in CODECS[name].options().items():
        assert field.default in VALUES[option]


def test_only_what_differs_is_printed() -> None:
    assert str(codec("int8:block=32,round=stochastic,symmetric=true")) == "int8:round=stochastic"
    assert str(codec(" int8:scale=fp32, block=64 ")) == "int8:block=64,scale=fp32"


def test_all_blocks() -> None:
    block = SMALLEST_BLOCK
    while block <= LARGEST_BLOCK:
        assert codec(f"int8:block={block}").layout().block == block
        block *= 2


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("int9", "unknown codec 'int9'; valid names: none, fp16, bf16, "),
        ("int1", "unknown codec 'int1'"),
        ("", "unknown codec ''"),
        ("INT8", "unknown codec 'INT8'"),
        ("int8:", "nothing follows the colon"),
        ("int8:blok=32", "unknown option 'blok'; valid options: block, scale, symmetric, round"),
        ("int8:bits=4", "unknown option 'bits'"),
        ("int8:block", "option 'block' needs a value; valid: a power of two from 16 to 4096"),
        ("int8:block=", "option 'block' is ''; valid: a power of two from 16 to 4096"),
        ("int8:block=33", "option 'block' is 33; valid: a power of two from 16 to 4096"),
        ("int8:block=8", "option 'block' is 8"),
        ("int8:block=8192", "option 'block' is 8192"),
        ("int8:block=0", "option 'block' is 0"),
        ("int8:block=-32", "option 'block' is '-32'"),
        ("int8:block=32.0", "option 'block' is '32.0'"),
        ("int8:block=32,block=32", "option 'block' is given twice"),
        ("int8:scale=fp16", "option 'scale' is fp16; valid: bf16, fp32"),
        ("int8:symmetric=yes", "option 'symmetric' is 'yes'; valid: true, false"),
        ("int8:round=up", "option 'round' is up; valid: nearest, stochastic"),
        ("fp16:block=32", "unknown option 'block'; it takes no options"),
        ("int8,block=32", "unknown codec 'int8,block=32'"),
    ],
)
def test_wrong_specs(spec: str, says: str) -> None:
    with pytest.raises(ValueError) as error:
        codec(spec)
    assert says in str(error.value)


@pytest.mark.parametrize("given", [None, 8, b"int8", ["int8"]])
def test_what_is_no_spec(given: object) -> None:
    with pytest.raises(TypeError, match=type(given).__name__):
        codec(given)  # type: ignore[arg-type]


def test_codecs_are_frozen_and_keyword_only() -> None:
    each = codec("int8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        each.block = 64  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        type(each)(8)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "wrong", [{"block": True}, {"block": "32"}, {"symmetric": 1}, {"bits": 9}, {"bits": 1}, {"bits": True}]
)
def test_values_are_checked_without_a_spec_too(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(codec("int8"), **wrong)
