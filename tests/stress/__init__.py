"""Stress programs that run for minutes to hours: random operations, soak runs, fault campaigns. See README.md."""

from __future__ import annotations

from bench.common import report

#: What a program wrote in full; a program that runs alone writes there.
DETAILS = report.ROOT / "build" / "stress"
