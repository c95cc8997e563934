"""How tests.stress.torch_suite judges what torch's tests did on the backend and on its peer."""

from __future__ import annotations

from typing import Any

from tests.stress.torch_suite import judge


def row(test: str, verdict: str, on_peer: str) -> dict[str, Any]:
    return {"test": test, "ranks": 2, "verdict": verdict, "reason": "why", "gloo": {"verdict": on_peer}}


def test_only_what_passes_on_the_peer_alone_is_a_fault() -> None:
    rows = [row("a", "passed", "passed"), row("b", "failed", "failed"), row("c", "passed", "failed")]
    assert judge(rows, {}, "gloo") == []
    assert judge([*rows, row("d", "failed", "passed")], {}, "gloo") == ["d on 2 ranks: why"]
    assert judge([{**row("b", "failed", "failed")}], {}, "") == ["b on 2 ranks: why"]


def test_an_expected_failure_has_to_fail() -> None:
    expected = {"a": "of Gloo alone"}
    assert judge([row("a", "failed", "passed")], expected, "gloo") == []
    assert judge([row("a", "skipped", "skipped")], expected, "gloo") == []
    assert judge([row("b", "passed", "passed")], expected, "gloo") == []
    (fault,) = judge([row("a", "passed", "passed")], expected, "gloo")
    assert fault == "a is listed as one that cannot pass (of Gloo alone), and passes"
