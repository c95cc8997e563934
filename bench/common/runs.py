"""The median of several runs of a program: every figure with its range, and rows matched by what they measure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

# The fields that say what a row is about. A program whose rows differ in another field adds it here.
IDENTIFYING = (
    "name what operation collective verb codec scheme method family variant ours peer against way beside cores "
    "recorded dtype architecture kernel link ranks seed bytes bucket_bytes gbit lost_share batch width tokens "
    "threads numel size layer step workload choices schedule features chosen"
).split()
# The machine's state during a run: no figure of a program, so a range of it says nothing.
STATE = ("load", "attempts", "repetitions", "iters")
# Of these the worst run counts.
WORST = ("wrong", "errors")


def key(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the identifying fields of a row, by which rows of several runs are matched."""
    return tuple((name, row[name]) for name in IDENTIFYING if isinstance(row.get(name), str | int | float))


def check_rows(value: Any, where: str = "result") -> None:
    """Raise if the rows of a list cannot be told apart.

    Raises:
        ValueError: Two rows of one list have the same identifying fields.
    """
    if isinstance(value, dict):
        for name, entry in value.items():
            check_rows(entry, f"{where}.{name}")
    elif _are_rows(value):
        for row_key, number in Counter(map(key, value)).items():
            if number > 1:
                raise ValueError(
                    f"{where}: {number} rows have {dict(row_key)}; add the field in which they differ to "
                    "IDENTIFYING in bench/common/runs.py"
                )
        for row in value:
            check_rows(row, where)


def merge(results: Sequence[Any]) -> Any:
    """Return the median of the results of several runs.

    Mappings are merged by key and lists of mappings by `key`; both keep what only some runs have. A number is the
    median, and where the runs differ ``<name>_range`` beside it holds the least and the greatest; of `WORST` it is the
    greatest. A list of numbers is the list of medians. Of anything else (a verdict, a choice) the most frequent value
    is taken; where two are equally frequent, ``"MISS"`` and False win, then the latest.

    Args:
        results: Values of one field, one for each run that has it, oldest first.
    """
    if len(results) == 1:
        return results[0]
    if all(isinstance(value, dict) for value in results):
        return _merge_mappings(results)
    if all(map(_are_rows, results)):
        return _merge_rows(results)
    lists = [value for value in results if isinstance(value, list | tuple)]
    if len(lists) == len(results) and len({len(value) for value in lists}) == 1:
        return [merge(entries) for entries in zip(*lists, strict=True)]
    numbers = [value for value in results if _is_number(value)]
    if 2 * len(numbers) > len(results):
        return numbers[0] if len(set(numbers)) == 1 else _rounded(statistics.median(numbers))
    return _most_frequent(results)


def _merge_mappings(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]
        if name in WORST:
            merged[name] = _worst(values)
            continue
        if name.endswith("_range") and all(isinstance(value, list | tuple) for value in values):
            # The program's own range, over what it repeats in one run.
            merged[name] = [min(value[0] for value in values), max(value[1] for value in values)]
            continue
        merged[name] = merge(values)
        numbers = [value for value in values if _is_number(value)]
        if name not in STATE and _is_number(merged[name]) and len(set(numbers)) > 1:
            merged.setdefault(f"{name}_range", [min(numbers), max(numbers)])
    return merged


def _merge_rows(results: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    groups: dict[tuple[tuple[str, Any], ...], list[dict[str, Any]]] = {}
    for rows in results:
        for row in rows:
            groups.setdefault(key(row), []).append(row)
    merged = []
    for group in groups.values():
        row = merge(group)
        # A row that only some of the runs measured says so.
        merged.append(row if len(group) == len(results) else {**row, "measurements": len(group)})
    return merged


def _worst(values: Sequence[Any]) -> Any:
    """Return the greatest number; of mappings, that of each key."""
    if all(isinstance(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _worst([value[name] for value in values if name in value]) for name in names}
    return max(values) if all(map(_is_number, values)) else values[-1]


def _most_frequent(values: Sequence[Any]) -> Any:
    """Return the most frequent value; the pessimistic, then the latest of equally frequent ones."""
    counts = Counter(map(repr, values))
    most = max(counts.values())
    candidates = [value for value in values if counts[repr(value)] == most]
    pessimistic = [value for value in candidates if value is False or value == "MISS"]
    return (pessimistic or candidates)[-1]


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.12g}")
