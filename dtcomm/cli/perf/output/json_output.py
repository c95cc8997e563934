"""The report as JSON and CSV. The JSON has nccl-tests' keys, with values as numbers and without the environment."""

from __future__ import annotations

import csv
import io
import json
import math
from datetime import datetime, timezone
from typing import Any

from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.output.table import average_bandwidths
from dtcomm.cli.perf.report import Measurement, Report, Row

VERSION = 1


def to_json(report: Report, argv: list[str]) -> str:
    """Return one JSON object; times in microseconds, bandwidths in GB/s (1e9 bytes), missing values null."""
    averages = average_bandwidths(report)
    document = {
        "version": VERSION,
        "start_time": _time(report.started),
        "args": ["dtcomm", "perf", *argv],
        "config": _config(report),
        "results": [_result(report, row) for row in report.rows],
        "out_of_bounds": {"count": report.wrong, "okay": report.wrong == 0},
        "average_bus_bandwidth": {
            "bandwidth": sum(averages.values()) / len(averages) if averages else None,
            "variants": averages,
        },
        "end_time": _time(report.ended),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def to_csv(report: Report) -> str:
    """Return one line per row, with a head; columns are the JSON's keys, with a dot for nested ones (in_place.time)."""
    lines = [_flat(_result(report, row)) for row in report.rows]
    out = io.StringIO()
    if lines:
        names = list(dict.fromkeys(name for line in lines for name in line))
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return out.getvalue()


def _config(report: Report) -> dict[str, Any]:
    options = report.options
    step = (
        {"step_factor": options.stepfactor} if options.stepfactor > 1 else {"step_bytes": options.stepbytes}
    )
    return {
        "collective": options.collective,
        "minimum_bytes": options.minbytes,
        "maximum_bytes": options.maxbytes,
        **step,
        "warmup_iters": options.warmup_iters,
        "iterations": options.iters,
        "aggregated_iterations": options.agg_iters,
        "validation": options.check,
        "average": ("rank0", "mean", "min", "max")[options.average],
        "blocking_collectives": bool(options.blocking),
        "report_cputime": options.report_cputime,
        "ranks": len(report.ranks),
        "device": options.device,
        "virtual_ranks": options.virtual,
        "graph_replays": options.cudagraph,
        "devices": [vars(rank) for rank in report.ranks],
        "backends": report.backends,
        "warnings": report.warnings,
        "gpus": report.gpus,
        "versions": report.versions,
    }


def _result(report: Report, row: Row) -> dict[str, Any]:
    result: dict[str, Any] = {
        "size": row.size,
        "count": row.count,
        "type": row.datatype,
        "redop": row.op,
        "root": row.root,
        "backend": row.variant.backend,
        "codec": row.variant.codec,
        "algorithm": row.variant.algorithm,
        "wire_bytes": row.wire_bytes,
        "moved_by": None if row.transport is None else row.transport.name,
        "moved_why": None if row.transport is None else row.transport.reason,
        "ratio": _finite(row.ratio),
        "ratios": row.ratios,
    }
    for place, measured in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
        result[place] = None if measured is None else _measured(report, row, measured)
        if measured is not None:
            result[f"{place}_per_iter"] = _per_iteration(measured)
    return result


def _measured(report: Report, row: Row, measured: Measurement) -> dict[str, Any]:
    collective = COLLECTIVES[report.options.collective]
    seconds, check = measured.timing.seconds, measured.check
    algorithm, bus = bandwidths(collective, row.size, seconds, len(report.ranks))
    return {
        "cpu_time" if report.options.report_cputime else "time": seconds * 1e6,
        "alg_bw": algorithm,
        "bus_bw": bus,
        "of_floor": _finite(measured.memory_floor_share),
        "nwrong": None if check is None else check.wrong,
        "max_error": None if check is None else _finite(check.max_error),
        "mean_error": None if check is None else _finite(check.mean_error),
    }


def _per_iteration(measured: Measurement) -> dict[str, Any]:
    statistics = measured.timing.statistics
    times = {f"{name}_us": value * 1e6 for name, value in vars(statistics).items()}
    return {
        **times,
        "cv_pct": statistics.variation,
        "times_us": [t * 1e6 for t in measured.timing.iterations],
    }


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items() if name != "times_us"}
        elif value is not None or not key.endswith("place"):
            flat[key] = value
    return flat


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
