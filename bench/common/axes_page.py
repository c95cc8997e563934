"""Tables of docs/results/axes.md: the axes of parallelism between two hosts."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from bench.common import pages

Row = dict[str, Any]


def pipeline(result: dict[str, Any]) -> str:
    """Return the table of `bench.pipeline`: a step of two stages."""
    return _table(result, "none", lambda row: f"{_link(row)}, width {row['width']}, {_schedule(row)}")


def experts(result: dict[str, Any]) -> str:
    """Return the table of `bench.experts`: the exchange of tokens."""
    return _table(
        result, "torch", lambda row: f"{_link(row)}, {row['dtype']}, top {row['choices']}, {row['operation']}"
    )


def context_parallel(result: dict[str, Any]) -> str:
    """Return the table of `bench.context_parallel`: attention over a sequence of which each rank has a half."""
    return _table(result, "ring none", lambda row: f"{_link(row)}, sequences of {row['tokens']} tokens")


def tp_chunks(result: dict[str, Any]) -> str:
    """Return the table of `bench.tp_chunks`: a layer whose product and sum overlap in chunks."""
    return _table(result, "1", lambda row: f"{_link(row)}, {row['features']} features, `{row['codec']}`")


def training(result: dict[str, Any]) -> str:
    """Return the table of the training of `bench.experts` or `bench.context_parallel`: held-out losses."""
    lines = [
        [name, *(f"{loss:.4f}" for loss in losses), f"{statistics.fmean(losses):.4f}"]
        for name, losses in result["losses"].items()
    ]
    columns = ["held-out loss", *(f"seed {seed}" for seed in result["seeds"]), "mean"]
    return pages.markdown(columns, lines, aligned=True)


def _table(result: dict[str, Any], base: str, case: Callable[[Row], str]) -> str:
    """Milliseconds of every contestant, and in brackets how many times faster it is than ``base``."""
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["contestants"]))
    shares = any("communication" in row for row in rows)
    lines = []
    for row in rows:
        cells = [case(row)]
        if shares:
            cells.append(f"{100 * row['communication']:.0f} %")
        for name in names:
            ratio = row["ratios"].get(name)
            faster = "" if ratio is None or name == base else f" ({ratio:.2f}×)"
            timing = row["contestants"][name]
            cells.append(f"{_ms(timing['median_us'])}{pages.spread(timing, 'median_us', _ms)}{faster}")
        lines.append(cells)
    columns = ["ms", *(["communication"] if shares else []), *names]
    return pages.markdown(columns, lines, aligned=True)


def _ms(microseconds: float) -> str:
    milliseconds = microseconds / 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _link(row: Row) -> str:
    return f"{row['gbit']:g} Gbit/s" if row["gbit"] else "shared memory"


def _schedule(row: Row) -> str:
    return {"gpipe": "GPipe", "1f1b": "1F1B"}[row["schedule"]]
