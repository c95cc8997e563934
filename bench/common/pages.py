"""Generated text in the pages of docs/: replaces text between two marks, and formats tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def fill(page: Path, name: str, text: str) -> Path:
    """Replace the text between the page's marks ``<!-- name:begin -->`` and ``<!-- name:end -->``; return the page.

    Raises:
        ValueError: The page does not have the marks.
    """
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, begin, tail = page.read_text(encoding="utf-8").partition(first)
    _, end, after = tail.partition(last)
    if not begin or not end:
        raise ValueError(f"{page.name}: lacks {first} or {last}")
    page.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")
    return page


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], aligned: bool = False) -> str:
    """Return a Markdown table; ``aligned``: all columns except the first are right-aligned."""
    rule = "|---" + ("|---:" if aligned else "|---") * (len(columns) - 1) + "|"
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def spread(row: dict[str, Any], field: str, shown: Callable[[float], str]) -> str:
    """Return `` [4.7–5.1]``, the least and greatest of a figure in several runs; nothing if there is no range."""
    low, high = map(shown, row.get(f"{field}_range", (row[field], row[field])))
    return f" [{low}–{high}]" if low != high else ""


def provenance(result: dict[str, Any]) -> str:
    """Return the sentence that says of how many runs, of which commit and on which processor a result is the median."""
    program = result["program"]
    measurements = result["measurements"]
    if "units" in measurements[0]:
        return f"`{program}`: {'; '.join(map(_of_units, measurements))}."
    latest = measurements[-1]
    unfit = sorted({reason for entry in measurements for reason in entry.get("unfit", ())})
    counts = _runs_of_rows(result, len(measurements))
    most = max(counts)
    number = f"median of {most} runs" if most > 1 else "one run"
    if min(counts) < most:
        number = f"median of {min(counts)} to {most} runs"
    ranges = ", least and greatest in brackets" if most > 1 else ""
    return (
        f"`{program}`: {number} of commit {latest['commit']}{ranges}, {latest['date']}, {latest['processor']}"
        + (f"; unfit: {'; '.join(unfit)}." if unfit else ".")
    )


def _runs_of_rows(result: dict[str, Any], runs: int) -> set[int]:
    """Return how many runs the rows have: not all ``runs`` if some measured other rows, such as another dtype."""
    lists = (value for name, value in result.items() if name != "measurements" and isinstance(value, list))
    rows = (row for entries in lists for row in entries if isinstance(row, dict))
    return {row.get("measurements", runs) for row in rows} or {runs}


def _of_units(measurement: dict[str, Any]) -> str:
    """Return how many units of work a commit made, for a result whose units are kept one by one."""
    number = f"{measurement['units']} unit{'s' if measurement['units'] != 1 else ''}"
    low, high = measurement["load"]
    unfit = f", unfit: {'; '.join(measurement['unfit'])}" if "unfit" in measurement else ""
    made = f"{measurement['date']}, {measurement['processor']}, load {low:g} to {high:g}"
    return f"{number} of commit {measurement['commit']}, {made}{unfit}"


def steps_by_case(rows: list[dict[str, Any]]) -> dict[tuple[float, int, str], list[dict[str, Any]]]:
    """Return the rows of ``bench.slow_link`` by rate, batch size and contestant.

    A contestant has several rows where runs of "auto" chose differently.
    """
    rows_by_case: dict[tuple[float, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        rows_by_case.setdefault((row["gbit"], row["batch"], row["name"]), []).append(row)
    return rows_by_case
