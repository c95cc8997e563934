"""Targets and verdicts of bench.tp_speed: which figures have a target, and that every missed one is shown."""

from __future__ import annotations

from typing import Any

import pytest

from bench import tp_speed


class FixedTimesPool:
    """A pool of ranks that returns fixed seconds for each contestant's step."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def call(self, method: str, name: str, **_: Any) -> list[float]:
        assert method == "measure"
        return [self.seconds[name], self.seconds[name] / 2]


@pytest.mark.parametrize(
    ("alone", "int4", "expected"),
    [
        (0.1, 0.2, ["PASS", "PASS"]),
        (0.1, 0.4, ["MISS", "MISS"]),
        (0.1, 0.24, ["PASS", "MISS"]),
        (0.5, 0.2, []),
    ],
)
def test_a_prefill_has_a_target_where_communication_dominates(
    alone: float, int4: float, expected: list[str]
) -> None:
    peers = {"torch fp32": 3.0, "torch bf16": 3.0, "gloo fp32": 1.0, "gloo bf16": 0.45}
    seconds = {**peers, tp_speed.ALONE: alone, **dict.fromkeys(tp_speed.CODECS, int4)}
    pool = FixedTimesPool(seconds)
    row = tp_speed._row(pool, 1.0, "prefill", 64, [*seconds], 1)
    assert row["communication"] == pytest.approx(1 - alone)
    verdicts = tp_speed.verdicts([row])
    assert [line.split()[0] for line in verdicts if "gloo" in line] == expected
    if not expected:
        assert verdicts == [
            "no target 1 Gbit/s, prefill, width 64: communication is 50 % of the time, so nothing could be more "
            "than 2.0x as fast; int4 is 5.00x"
        ]
    assert ("!" in str(tp_speed.table([row]))) == ("MISS" in expected)
