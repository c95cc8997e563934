from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.codecs import codec
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, WIDTH, train, wrapped

STEPS = 4
MATRIX = WIDTH * WIDTH


def train_and_report(rank: int, world_size: int, spec: str) -> tuple[dict[str, Any], str]:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, spec, feedback=True)
    train(model, rank, range(STEPS))
    report = state.report()
    return report.to_dict(), str(report)


def test_report_names_every_parameter_once_with_codec_bytes_and_error() -> None:
    for report, text in run_ranks(train_and_report, 2, "int8"):
        rows = {row["codec"]: row for row in report["rows"]}
        assert sorted(rows["int8"]["names"]) == ["branch.weight", "first.weight", "last.weight"]
        assert sorted(rows["none"]["names"]) == ["first.bias", "last.bias", "norm.bias", "norm.weight"]
        assert rows["none"]["reason"] == "policy: ndim<2"
        assert rows["none"]["relative_error"] == 0
        assert 1e-4 < rows["int8"]["relative_error"] < 0.05
        assert rows["int8"]["saved_bytes"] > 0.7 * rows["int8"]["plain_bytes"]
        assert report["steps"] == STEPS
        assert report["messages"] > STEPS  # several buckets
        assert report["residual_bytes"] == 3 * MATRIX * 4
        assert report["seconds"] > 0
        assert "policy: ndim<2" in text
        json.dumps(report)


def test_bytes_are_those_of_a_two_shot_between_two_ranks() -> None:
    """Each rank sends half of every payload to reduce, and half to gather: in all, one payload a step."""
    reports = run_ranks(train_and_report, 2, "int8")
    payload = 3 * codec("int8").wire_bytes(MATRIX) + codec("none").wire_bytes(4 * WIDTH)
    total = sum(report["wire_bytes"] for report, _ in reports)
    assert 0.95 <= total / (2 * STEPS * payload) <= 1.1
    for report, _ in reports:
        assert abs(sum(row["wire_bytes"] for row in report["rows"]) - report["wire_bytes"]) <= len(
            report["rows"]
        )


def test_a_policy_chooses_by_name() -> None:
    report, text = run_ranks(train_and_report, 2, "name=first.* -> fp16; name=last.* -> int8")[0]
    by_codec = {(row["codec"], row["reason"]): sorted(row["names"]) for row in report["rows"]}
    assert by_codec["fp16", ""] == ["first.bias", "first.weight"]
    assert by_codec["int8", ""] == ["last.bias", "last.weight"]
    assert by_codec["none", "no rule matches"] == ["branch.weight", "norm.bias", "norm.weight"]
    assert "no rule matches" in text


def collect_uncompressed(
    rank: int, world_size: int, spec: str, dtype: torch.dtype, width: int
) -> tuple[str, str, list[str]]:
    """Return the report's sentence about what is not compressed, its first line, and what was logged in five steps."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dtcomm").addHandler(handler)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width)).to(dtype)
    model = DistributedDataParallel(net)
    state = ddp.compress(model, spec, feedback=True, warmup=2)
    for _ in range(5):
        model(torch.randn(2, width, dtype=dtype)).sum().backward()
    logging.getLogger("dtcomm").removeHandler(handler)
    return state.report().uncompressed, str(state.report()).splitlines()[0], logged


@pytest.mark.parametrize(
    ("spec", "dtype", "width", "says"),
    [
        (
            "int8",
            torch.float64,
            64,
            "98% of the elements, 0.weight … 1.weight (int8 does not take float64)",
        ),
        (
            "int8",
            torch.float32,
            16,
            "94% of the elements, 0.weight … 1.weight (policy: numel<1024)",
        ),
        (
            "name=*head* -> int8",
            torch.float32,
            64,
            "gradients of all 4 parameters (no rule matches)",
        ),
        ("powersgd:rank=64", torch.float32, 64, "powersgd:rank=64 would not make 64x64 smaller"),
    ],
)
def test_what_was_asked_for_and_is_not_compressed_is_logged_once(
    spec: str, dtype: torch.dtype, width: int, says: str
) -> None:
    (text, first_line, logged), (_, _, elsewhere) = run_ranks(collect_uncompressed, 2, spec, dtype, width)
    assert text.startswith("nothing is compressed although asked for: ") and says in text
    assert first_line == text and logged == [f"dtcomm.ddp: {text}"] and elsewhere == []


@pytest.mark.parametrize(("spec", "dtype"), [("int8", torch.float32), ("none", torch.float64)])
def test_nothing_is_logged_where_all_is_as_asked(spec: str, dtype: torch.dtype) -> None:
    for text, first_line, logged in run_ranks(collect_uncompressed, 2, spec, dtype, 64):
        assert text == "" and logged == [] and first_line.startswith("dtcomm DDP: ")


def test_a_part_that_is_not_compressed_is_named() -> None:
    spec = "name=0.* -> int8; * -> powersgd:rank=64"
    (text, _, logged), _ = run_ranks(collect_uncompressed, 2, spec, torch.float32, 64)
    assert (
        text.startswith("not compressed although asked for: ")
        and "1.weight" in text
        and "0.weight" not in text
    )
    assert logged == [f"dtcomm.ddp: {text}"]
