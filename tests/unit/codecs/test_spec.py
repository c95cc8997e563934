"""Spec strings parse to codecs and print back; the error for a wrong spec names the part and what is valid."""

from __future__ import annotations

import dataclasses

import pytest

from dtcomm.codecs import Codec, names
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import LARGEST_BLOCK, SMALLEST_BLOCK
from dtcomm.codecs.spec import CODECS
from tests.unit.codecs.cases import VALUES, codecs_with_option_sets


@pytest.mark.parametrize("codec", codecs_with_option_sets(), ids=str)
def test_a_spec_parses_back(codec: Codec) -> None:
    assert parse(str(codec)) == codec
    assert hash(parse(str(codec))) == hash(codec)
    assert parse(codec) is codec


@pytest.mark.parametrize("name", names())
def test_a_default_prints_as_its_name(name: str) -> None:
    assert str(parse(name)) == name == parse(name).name


@pytest.mark.parametrize("name", names())
def test_every_option_has_values_to_test(name: str) -> None:
    for option, field in CODECS[name].options().items():
        assert field.default in VALUES[option]


@pytest.mark.parametrize("name", names())
def test_the_class_documents_options_and_reference(name: str) -> None:
    text = type(parse(name)).__doc__ or ""
    assert f"dtcomm.kernels.reference.{parse(name).reference}" in " ".join(text.split())
    assert all(f"{option}: " in text for option in CODECS[name].options())


def test_only_options_that_differ_from_the_default_are_printed() -> None:
    assert str(parse("int8:block=32,round=stochastic,symmetric=true")) == "int8:round=stochastic"
    assert str(parse(" int8:scale=fp32, block=64 ")) == "int8:block=64,scale=fp32"


def test_every_power_of_two_is_a_valid_block() -> None:
    block = SMALLEST_BLOCK
    while block <= LARGEST_BLOCK:
        assert parse(f"int8:block={block}").layout().block == block
        block *= 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int9", "unknown codec 'int9' (did you mean 'int8'?); valid names: none, fp16, bf16, "),
        ("int1", "unknown codec 'int1'"),
        ("", "unknown codec ''"),
        ("INT8", "unknown codec 'INT8'"),
        ("int8:", "nothing follows the colon"),
        (
            "int8:blok=32",
            "unknown option 'blok' (did you mean 'block'?); valid options: block, scale",
        ),
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
        ("topk:ratio=0", "option 'ratio' is 0.0; valid: a number above 0, at most 1"),
        ("topk:ratio=1.5", "option 'ratio' is 1.5; valid: a number above 0, at most 1"),
        ("topk:ratio=1e999", "option 'ratio' is inf"),
        ("topk:ratio=-0.1", "option 'ratio' is '-0.1'"),
        ("topk:ratio=nan", "option 'ratio' is 'nan'"),
        ("topk:ratio=1_0", "option 'ratio' is '1_0'"),
        ("topk:ratio=1%", "option 'ratio' is '1%'; valid: a number above 0, at most 1"),
        ("randk:values=int9", "option 'values' is int9; valid: bf16, fp16, fp32, int8"),
        ("randk:block=32", "unknown option 'block'; valid options: ratio, values, round"),
        (
            "topk:round=stochastic",
            "values=bf16 is a cast, which rounds to nearest; valid with stochastic: values=int8",
        ),
        ("int8,block=32", "unknown codec 'int8,block=32'"),
    ],
)
def test_wrong_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(spec)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [None, 8, b"int8", ["int8"]])
def test_values_of_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ratio", [0.01, 0.1, 1 / 3, 1e-7, 5e-324, 0.1 + 0.2, 1.0, 2**-12, 0.3333333333333333]
)
def test_ratios_print_exactly(ratio: float) -> None:
    codec = parse(f"topk:ratio={ratio!r}")
    assert codec.ratio == ratio  # type: ignore[attr-defined]
    assert parse(str(codec)) == codec and parse(str(codec)).ratio == ratio  # type: ignore[attr-defined]


def test_notations_of_a_ratio_are_equal() -> None:
    assert (
        parse("topk:ratio=.5")
        == parse("topk:ratio=0.50")
        == parse("topk:ratio=5e-1")
        == parse("topk:ratio=5E-01")
    )
    assert (
        parse("randk:ratio=1") == parse("randk:ratio=1.0")
        and str(parse("randk:ratio=1")) == "randk:ratio=1.0"
    )
    assert str(parse("topk:ratio=0.01")) == "topk"
    whole = dataclasses.replace(parse("topk"), ratio=1)  # type: ignore[call-arg]
    assert str(whole) == "topk:ratio=1.0" and hash(whole) == hash(parse("topk:ratio=1"))


@pytest.mark.parametrize(
    "wrong", [{"ratio": True}, {"ratio": "0.1"}, {"ratio": float("nan")}, {"values": "int1"}]
)
def test_values_of_sparse_codecs_are_checked_without_a_spec_too(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(parse("topk"), **wrong)  # type: ignore[arg-type]


def test_codecs_are_frozen_and_keyword_only() -> None:
    codec = parse("int8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.block = 64  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        type(codec)(8)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "wrong", [{"block": True}, {"block": "32"}, {"symmetric": 1}, {"bits": 9}, {"bits": 1}, {"bits": True}]
)
def test_values_are_checked_without_a_spec_too(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(parse("int8"), **wrong)
