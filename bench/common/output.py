"""Result files, and tables on the terminal."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common import conditions, runs

RESULTS = conditions.ROOT / "bench" / "results"
# The latest results of programs that have since run on another processor: <name>.<processor>.json.
OTHER_PROCESSORS = "other_processors"
# The runs of which bench/results holds the medians: larger, and of no use without the machine that made them.
RUNS = conditions.ROOT / "build" / "bench" / "runs"
UNFIT = "BENCH_UNFIT"
# Fields of results that hold a program's options: runs with others have no common median.
SETTINGS = (
    "quick options round_trip_ms mtu congestion_control largest_buffers mbit scaled layers sums width pairs ranks"
).split()
_START = conditions.ProcessorTime.now()  # programs import this module before they measure


class NotKept(SystemExit):
    """A result that was measured under conditions under which no result is kept."""


def write(
    name: str, result: dict[str, Any], path: str | os.PathLike[str] | None = None, *, timed: bool = True
) -> Path:
    """Write the summary of a result to a file, and return its path.

    ``bench/results/<name>.json`` gets the median of this run and of the earlier ones on the same commit and processor
    (see `bench.common.runs.merge`), and in ``measurements`` the date, commit, load and processor of each run. The first
    run on another commit replaces the file; the first on another processor moves it to ``other_processors``. A file
    elsewhere holds this run alone.

    Args:
        name: The program's name.
        result: What it measured. Fields of `SETTINGS` are options: runs with others are not mixed.
        path: Where to write instead of ``bench/results/<name>.json``.
        timed: Whether the result holds times. If not, another run gives the same figures: the file holds the latest run
            alone, and other processes do not matter.

    Raises:
        NotKept: The file is in ``bench/results``, and the tree has changes that are not committed, other processes used
            the processor, a figure has fewer than three repetitions, a sum was wrong, or it is a quick run. The run is
            in ``build/bench/not_kept``. With ``BENCH_UNFIT=1`` in the environment it is kept all the same, and marked.
        ValueError: Rows of several runs could not be matched; the message says what to do. The run is in that folder.
    """
    out = Path(path) if path else RESULTS / f"{name}.json"
    stamped = {"program": name, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **summary(result)}
    measurement = _measurement(stamped, timed)
    kept = out.resolve().parent == RESULTS.resolve()
    aside = RUNS.parent / "not_kept" / out.name
    if kept:  # what is refused below is not lost
        write_whole(aside, format_json({**stamped, "measurements": [measurement]}))
    if kept and "unfit" in measurement and os.environ.get(UNFIT) != "1":
        raise NotKept(
            f"bench.{name}: not kept, because {'; '.join(measurement['unfit'])}. The figures are in {aside}; "
            f"{UNFIT}=1 keeps them and marks them as unfit"
        )
    entries = [{"measurement": measurement, "result": stamped}]
    if kept and timed:
        runs.check_rows(stamped)
        store = RUNS / out.name
        earlier = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
        entries = [entry for entry in earlier if _setting(entry) == _setting(entries[0])] + entries
        write_whole(store, json.dumps(entries))
    latest = {field: stamped[field] for field in ("time", "machine") if field in stamped}
    merged = runs.merge([entry["result"] for entry in entries])
    merged.pop("time_range", None)
    measurements = [entry["measurement"] for entry in entries]
    if kept and timed:
        _put_aside(out, measurement["processor"])
    write_whole(out, format_json({**merged, **latest, "measurements": measurements}))
    if kept:
        aside.unlink()
    return out


def all_processors(name: str) -> list[dict[str, Any]]:
    """Return the kept results of a program: the latest, then those of other processors."""
    paths = [RESULTS / f"{name}.json", *sorted((RESULTS / OTHER_PROCESSORS).glob(f"{name}.*.json"))]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _put_aside(out: Path, processor: str) -> None:
    """Move the kept result ``out`` if another processor made it; remove an older one of ``processor``."""
    folder = out.parent / OTHER_PROCESSORS
    if out.exists():
        made_by = _processor_of(json.loads(out.read_text(encoding="utf-8")))
        if made_by and made_by != processor:
            folder.mkdir(exist_ok=True)
            out.replace(folder / f"{out.stem}.{_file_part(made_by)}.json")
    (folder / f"{out.stem}.{_file_part(processor)}.json").unlink(missing_ok=True)


def _processor_of(result: dict[str, Any]) -> str | None:
    """Return the processor that made a result; None if it does not say so."""
    measurements = result.get("measurements")
    name = measurements[-1]["processor"] if measurements else result.get("machine", {}).get("cpu")
    return str(name) if name else None


def _file_part(processor: str) -> str:
    """Return ``amd-epyc`` for ``AMD EPYC``."""
    return re.sub("[^a-z0-9]+", "-", re.sub(r"\(\w+\)|processor", "", processor.lower())).strip("-")


def resumable(path: Path) -> dict[str, Any]:
    """Return the result at ``path`` if this commit made it on this processor, so that a program can go on from it."""
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made_by = [(entry["commit"], entry["processor"]) for entry in saved.get("measurements", [])]
    return saved if made_by == [(conditions.code_commit(), conditions.processor())] else {}


def _measurement(result: dict[str, Any], timed: bool) -> dict[str, Any]:
    """Return when and where a result was measured, and in ``unfit`` why it should not be kept."""
    others = _START.others() if timed and _START else None
    repetitions = min(_repetitions(result), default=None) if timed else None
    reasons = conditions.complaints(conditions.changed_files(), others, repetitions)
    if result.get("quick"):
        reasons.append("a quick run has fewer repetitions than others")
    if wrong := sum(_wrong(result)):
        reasons.append(f"{wrong:g} results were wrong")
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": conditions.code_commit(),
        "processor": conditions.processor(),
        "load": round(os.getloadavg()[0], 2),
        **({} if others is None else {"other_processes_cores": round(others, 3)}),
        **({"unfit": reasons} if reasons else {}),
    }


def _repetitions(value: Any) -> Iterator[int]:
    """Yield the number of repetitions of every figure that says it."""
    if isinstance(value, dict):
        if isinstance(value.get("repetitions"), int):
            yield value["repetitions"]
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from _repetitions(entry)


def _wrong(value: Any) -> Iterator[float]:
    """Yield how many results the fields ``wrong`` hold: a number, one for each contestant, or a list of sentences."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if name != "wrong":
                yield from _wrong(entry)
            elif isinstance(entry, list):
                yield len(entry)
            else:
                yield from entry.values() if isinstance(entry, dict) else [entry]
    elif isinstance(value, list):
        for entry in value:
            yield from _wrong(entry)


def _setting(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return what two runs must have in common for a median."""
    measurement, result = entry["measurement"], entry["result"]
    made = (measurement["commit"], measurement["processor"], "unfit" in measurement)
    return (*made, *(result.get(name) for name in SETTINGS))


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that a program that is killed leaves the previous or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def summary(value: Any) -> Any:
    """Return a result whose timings have only their median, quartiles and number of repetitions."""
    if isinstance(value, dict):
        dropped = ("best_us", "worst_us") if "median_us" in value else ()
        return {key: summary(entry) for key, entry in value.items() if key not in dropped}
    if isinstance(value, list | tuple):
        return [summary(entry) for entry in value]
    return value


def format_json(document: dict[str, Any]) -> str:
    """Return JSON with one line for each entry of the document's lists and mappings of lists and mappings."""
    return (
        "{\n"
        + ",\n".join(f" {json.dumps(key)}: {_format(value)}" for key, value in document.items())
        + "\n}\n"
    )


def _format(value: Any) -> str:
    entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(entry, dict | list) for entry in entries):
        return json.dumps(value)
    if isinstance(value, dict):
        lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(lines) + "\n }"
    return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"


def size_name(size: int) -> str:
    """Return ``1 KB`` for 1024; units are powers of 1024, as in the README."""
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def parse_size(text: str) -> int:
    """Return 65536 for ``64K``."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text[:-1] if scale > 1 else text) * scale


def microseconds(seconds: float) -> str:
    """Return microseconds with three significant digits, or as a whole number from 100 on."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with rich if it is installed; the first column is left-aligned."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
        print(title)
        for row in [columns, *rows]:
            cells = [
                str(c).ljust(w) if i == 0 else str(c).rjust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells))
        return
    shown = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(str(cell) for cell in row))
    # A pipe has no width; a wide console avoids truncated cells.
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(shown)
