"""Stress programs that run for minutes to hours: random operations, soak runs, fault campaigns. See README.md."""

from __future__ import annotations

from bench.common import conditions

#: What a program wrote in full; its counts are kept in bench/results/reliability.
DETAILS = conditions.ROOT / "build" / "stress"
