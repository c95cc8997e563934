"""bench.compare_checkouts: the cases of the command line, turns, and the summary of the rounds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bench import compare_checkouts
from bench.common.checkout_rank import Bucket, EqualBuckets, counted
from bench.compare_checkouts import (
    COLLECTIVES,
    FORMS,
    VERBS,
    Case,
    Checkout,
    Comparison,
    choose_cases,
    default_cases,
)
from dtcomm import codecs
from dtcomm.compress.policy import default_policy
from tests.support import fake_cuda_tensor
from tests.support.stream_checker import RecordedStreams


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("all_reduce:64K:none", Case("all_reduce", 65536, "none")),
        ("hook:8:256K:int8", Case("hook", 262144, "int8", buckets=8)),
        ("decode:1M:topk:ratio=0.01", Case("decode", 1 << 20, "topk:ratio=0.01")),
        ("encode:1000:sign", Case("encode", 1000, "sign")),
        ("sendrecv:1M:int8", Case("sendrecv", 1 << 20, "int8")),
        ("repeated:1K:none", Case("repeated", 1024, "none")),
        ("backend:all_gather:1M", Case("backend", 1 << 20, "none", call="all_gather")),
        ("launches:4:256K:topk:ratio=0.01", Case("launches", 262144, "topk:ratio=0.01", buckets=4)),
    ],
)
def test_a_case_is_parsed_and_printed(text: str, case: Case) -> None:
    assert Case.parse(text) == case
    assert str(case) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gather:1K:none", "the kind 'gather' is none of all_reduce, reduce_scatter"),
        ("all_reduce:1K", "expected all_reduce:SIZE:CODEC"),
        ("all_reduce:big:none", "expected all_reduce:SIZE:CODEC"),
        ("hook:1M:none", "expected hook:BUCKETS:SIZE:CODEC, such as hook:8:1M:int8"),
        ("hook:0:1M:none", "BUCKETS at least 1"),
        ("encode:2:none", "at least 4 bytes"),
        ("encode:1K:", "CODEC not empty"),
        ("backend:all_reduce:1K:int8", "expected backend:COLLECTIVE:SIZE, such as backend:all_reduce:1M"),
        ("backend:gather:1K", "the collective 'gather' is none of all_reduce"),
    ],
)
def test_a_wrong_case_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case.parse(text)


def test_the_default_cases_contain_every_verb_of_every_codec() -> None:
    cases = default_cases()
    assert len(set(cases)) == len(cases)
    for verb in VERBS:
        assert {case.codec for case in cases if case.kind == verb} == set(codecs.names())
    assert choose_cases(None) == cases


def test_the_default_cases_contain_every_kind_and_every_collective_of_the_backend() -> None:
    cases = default_cases()
    assert {case.kind for case in cases} == set(FORMS)
    assert {case.call for case in cases if case.kind == "backend"} == set(COLLECTIVES)


def test_a_kind_stands_for_its_default_cases() -> None:
    hooks = [case for case in default_cases() if case.kind == "hook"]
    extra = "all_reduce:2M:int3"
    assert choose_cases(["hook", extra, str(hooks[0])]) == [*hooks, Case.parse(extra)]


class CheckoutStub:
    """A checkout whose calls take known times; it records when it measures."""

    def __init__(self, side: str, seconds: dict[str, float], turns: list[tuple[str, str]]) -> None:
        self.side = side
        self.seconds = seconds
        self.turns = turns

    def prepare(self, case: Case) -> str:
        return "" if case.codec in self.seconds else f"ValueError: no codec {case.codec}"

    def measure(self, case: Case, calls: int) -> float:
        self.turns.append((self.side, case.codec))
        return self.seconds[case.codec]


def test_checkouts_take_turns_and_a_case_that_one_lacks_is_left_out() -> None:
    turns: list[tuple[str, str]] = []
    sides = {
        "other": CheckoutStub("other", {"none": 1e-3, "int8": 2e-3}, turns),
        "this": CheckoutStub("this", {"none": 3e-3, "int8": 1e-3, "int4": 1e-3}, turns),
    }
    cases = [Case("all_reduce", 1024, codec) for codec in ("none", "int4", "int8")]
    seconds, errors = compare_checkouts.take_turns(
        cast(dict[str, Checkout], sides), cases, range(2), budget=0.01
    )
    assert errors == {cases[1]: "other checkout: ValueError: no codec int4"}
    assert seconds == {
        cases[0]: [{"other": 1e-3, "this": 3e-3}] * 2,
        cases[2]: [{"other": 2e-3, "this": 1e-3}] * 2,
    }
    assert turns[4:] == [  # after the two calls of each case that choose the number of calls
        ("other", "none"),
        ("this", "none"),
        ("other", "int8"),
        ("this", "int8"),
        ("this", "none"),
        ("other", "none"),
        ("this", "int8"),
        ("other", "int8"),
    ]


def test_the_ratio_is_the_median_over_rounds_of_the_ratios_of_a_round() -> None:
    # A machine that is ten times slower in one round changes the times but not the ratio of that round.
    rounds = [
        {"other": 10e-6, "this": 12e-6},
        {"other": 100e-6, "this": 110e-6},
        {"other": 10e-6, "this": 10e-6},
    ]
    row: dict[str, Any] = Comparison.of(Case("encode", 1 << 20, "int8"), rounds).as_dict()
    assert row["case"] == "encode:1M:int8"
    assert row["ratio"] == 1.1
    assert row["ratio_quartiles"] == [1.05, 1.15]
    assert row["other"]["median_us"] == 10 and row["this"]["median_us"] == 12


def test_a_folder_without_a_built_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="is not a checkout"):
        compare_checkouts.require_built(tmp_path)
    (tmp_path / "dtcomm").mkdir()
    (tmp_path / "dtcomm" / "__init__.py").touch()
    with pytest.raises(SystemExit):
        compare_checkouts.main([str(tmp_path)])
    assert "has no native module: run `make build` there first" in capsys.readouterr().err


def test_launches_are_counted_but_views_and_empty_tensors_are_not() -> None:
    counts: Counter[str] = Counter()
    with counted(fake_cuda_tensor, counts), fake_cuda_tensor.fake_cuda_device(RecordedStreams()):
        tensor = fake_cuda_tensor.to_fake_cuda(torch.zeros(64))
        tensor.view(8, 8)
        torch.empty_like(tensor)
        tensor.add_(tensor.mul(2.0))
    tensor.mul_(2.0)  # no longer counted
    assert counts == {"mul": 1, "add_": 1}


def test_a_launch_on_one_checkout_alone_is_named() -> None:
    row = {"case": "launches:1:1K:none", "other": {"kernel combine": 2, "add_": 1}, "this": {"add_": 3}}
    assert compare_checkouts.launch_cells(row) == [row["case"], "3", "3", "2 add_", "2 kernel combine"]


def test_a_bucket_has_the_shapes_of_its_parameter() -> None:
    bucket = Bucket(0, True, torch.zeros(8, 4), memory := torch.arange(32.0))
    (gradient,) = bucket.gradients()
    assert gradient.shape == (8, 4) and torch.equal(gradient.flatten(), memory)


def test_the_default_policy_compresses_the_parameters_of_the_hook_cases() -> None:
    rules = default_policy("int8")
    for name, parameter in EqualBuckets(2, 4096).named_parameters():
        assert str(rules.choose(name, parameter).codec) == "int8"
