from __future__ import annotations

import json
from typing import Any

from dtcomm import ddp
from dtcomm.codecs import codec
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, WIDTH, train, wrapped

STEPS = 4
MATRIX = WIDTH * WIDTH


def train_and_report(rank: int, world_size: int, spec: str) -> tuple[dict[str, Any], str]:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, spec)
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
