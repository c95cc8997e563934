"""Policies: which tensors get which codec, why others get none, and the text form."""

from __future__ import annotations

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.compress.policy import MIN_COMPRESSED_ELEMENTS, Policy, as_policy, default_policy


def test_matrices_are_compressed_and_vectors_are_not() -> None:
    policy = default_policy("int8")
    assert policy.choose("w", torch.empty(64, 64)).codec == codec("int8")
    assert policy.choose("b", torch.empty(10_000)).codec == codec("none")
    assert policy.choose("b", torch.empty(10_000)).reason == "policy: ndim<2"


@pytest.mark.parametrize("numel", [MIN_COMPRESSED_ELEMENTS - 1, MIN_COMPRESSED_ELEMENTS])
def test_the_bound_on_small_matrices_is_exclusive(numel: int) -> None:
    small = default_policy("int8").choose("w", torch.empty(1, numel)).codec == codec("none")
    assert small == (numel < MIN_COMPRESSED_ELEMENTS)


@pytest.mark.parametrize(
    ("spec", "dtype", "reason"),
    [
        ("int8", torch.float64, "int8 does not take float64"),
        ("fp16", torch.bfloat16, "fp16 would not make bfloat16 smaller"),
        ("bf16", torch.float16, "bf16 would not make float16 smaller"),
    ],
)
def test_the_reason_why_a_type_is_not_compressed(spec: str, dtype: torch.dtype, reason: str) -> None:
    choice = default_policy(spec).choose("w", torch.empty(64, 64, dtype=dtype))
    assert (str(choice.codec), choice.reason) == ("none", reason)


@pytest.mark.parametrize(("spec", "numel"), [("exact", 64 * 64), ("exact:bits=16", 1)])
def test_a_reproducible_codec_need_not_make_a_tensor_smaller(spec: str, numel: int) -> None:
    gradient = torch.empty(numel)
    assert codec(spec).wire_bytes(numel) > 4 * numel
    assert str(Policy.parse(f"* -> {spec}").choose("w", gradient).codec) == spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_int8_takes_every_training_dtype(dtype: torch.dtype) -> None:
    assert str(default_policy("int8").choose("w", torch.empty(64, 64, dtype=dtype)).codec) == "int8"


def test_the_first_rule_that_matches_decides() -> None:
    policy = Policy.parse("name=*.embed* -> fp16") | default_policy("int8")
    matrix = torch.empty(64, 64)
    assert str(policy.choose("model.embedding.weight", matrix).codec) == "fp16"
    assert str(policy.choose("model.head.weight", matrix).codec) == "int8"


def test_tensors_that_no_rule_matches_stay_uncompressed() -> None:
    choice = Policy.parse("name=head* -> int8").choose("body", torch.empty(64, 64))
    assert (str(choice.codec), choice.reason) == ("none", "no rule matches")


@pytest.mark.parametrize(
    "text",
    [
        "ndim<2 -> none; numel<1024 -> none; * -> int8",
        "ndim<3 numel<5000 name=*.bias -> fp16; * -> bf16",
        "* -> none",
    ],
)
def test_policies_round_trip_through_text(text: str) -> None:
    policy = Policy.parse(text)
    assert str(policy) == text
    assert Policy.parse(str(policy)) == policy
    assert as_policy(text) == policy == as_policy(policy)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("ndim<2 none", "expected 'condition -> codec'"),
        ("rank<2 -> none", "rank<2"),
        ("ndim<two -> none", "integer"),
        ("* -> int99", "int99"),
    ],
)
def test_errors_name_the_part_that_is_wrong(text: str, names: str) -> None:
    with pytest.raises(ValueError, match=names.replace("*", r"\*")):
        Policy.parse(text)


def test_rules_match_types_of_modules() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))
    policy = Policy.parse("module=Embed* -> fp16; ndim<2 -> none; * -> int8")
    assert str(Policy.parse(str(policy))) == "module=Embed* -> fp16; ndim<2 -> none; * -> int8"
    for_model = policy.for_model(model)
    chosen = {
        name: str(for_model.choose(name, parameter).codec) for name, parameter in model.named_parameters()
    }
    assert chosen == {"0.weight": "fp16", "1.weight": "int8", "1.bias": "none"}
    with pytest.raises(ValueError, match=r"'module=Embed\* -> fp16' wants the types of modules"):
        policy.choose("0.weight", model[0].weight)
