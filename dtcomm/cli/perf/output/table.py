"""The table, as nccl-tests prints it: its columns first and unchanged, so that what parses that parses this."""

from __future__ import annotations

import dtcomm
from dtcomm.cli.perf.backends.base import Moved
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.options import Options
from dtcomm.cli.perf.report import Measurement, Report, Row
from dtcomm.codecs import codec

_MOVED = len("fused:double_tree")  # the column's width


def header(report: Report) -> list[str]:
    """Version, parameters, one line per rank, backends, warnings and the heads of the columns."""
    options = report.options
    step = f"{options.stepfactor}(factor)" if options.stepfactor > 1 else f"{options.stepbytes}(bytes)"
    lines = [
        f"# dtcomm {dtcomm.__version__}",
        f"# Collective test starting: {options.collective}",
        f"# minBytes {options.minbytes} maxBytes {options.maxbytes} step: {step} warmup iters: "
        f"{options.warmup_iters} iters: {options.iters} agg iters: {options.agg_iters} "
        f"validation: {options.check} average: {('rank 0', 'mean', 'min', 'max')[options.average]}"
        + (f" graph: {options.cudagraph}" if options.cudagraph else ""),
    ]
    if options.blocking:
        lines.append("# Blocking Enabled: wait for completion of each collective, barrier before the next")
    if options.per_iter:
        lines.append("# Per-Iteration Report: i_* are of the slowest rank in each iteration")
    lines += ["#", "# Using devices"]
    lines += [
        f"#  Rank {rank.rank:2d} Pid {rank.pid:6d} on {rank.hostname:>10} device {rank.device}"
        for rank in report.ranks
    ]
    if options.device_why:
        lines.append(f"# Device {options.device}: {options.device_why}")
    lines += [f"# Backend {name}: {words}" for name, words in report.backends.items() if words]
    if len(options.variants) == 1:
        lines.append(f"# Codec {options.variants[0].codec}, algorithm {options.variants[0].algorithm}")
    lines += [f"# WARNING: {warning}" for warning in report.warnings]
    return [*lines, "#", *_column_heads(options)]


def _column_heads(options: Options) -> list[str]:
    time = "cputime" if options.report_cputime else "time"
    place = [(f"{time:>7}", "   (us)"), (" algbw", "(GB/s)"), (" busbw", "(GB/s)"), ("#wrong", "      ")]
    if options.per_iter:
        place += [
            ("  i_min", "   (us)"),
            ("  i_max", "   (us)"),
            ("  i_p99", "   (us)"),
            ("  i_cv%", "    (%)"),
        ]
    case = [("#       size", "#        (B)"), ("       count", "  (elements)"), ("    type", "        ")]
    case += [(" redop", "      "), ("  root", "      ")]
    columns = case + place + place + _own_heads(options)
    width = len("  ".join(head for head, _ in place))
    above = f"{'out-of-place':^{width}}  {'in-place':^{width}}"
    return [
        ("#" + " " * len("  ".join(head for head, _ in case)) + " " + above).rstrip(),
        "  ".join(head for head, _ in columns).rstrip(),
        "  ".join(unit for _, unit in columns).rstrip(),
    ]


def _own_heads(options: Options) -> list[tuple[str, str]]:
    heads = [("    wire", "     (B)")]
    if options.virtual:
        heads.append(("  floor", "       "))
    if options.on_device:
        heads.append(("moved".rjust(_MOVED), " " * _MOVED))
    if _lossy(options):
        heads += [("   maxerr", "         "), ("  meanerr", "         ")]
    if len(options.variants) > 1:
        width = _variant_width(options)
        names = [f"vs {peer}" for peer in options.compare] or ["ratio"]
        heads += [
            *((name.rjust(7), " " * max(7, len(name))) for name in names),
            ("variant".ljust(width), " " * width),
        ]
    return heads


def row(options: Options, row: Row, ranks: int) -> str:
    """One line of the table."""
    cells = [f"{row.size:12d}  {row.count:12d}  {row.datatype:>8}  {row.op:>6}  {row.root:6d}"]
    cells += [_place(options, row, measured, ranks) for measured in (row.out_of_place, row.in_place)]
    cells.append(f"{'N/A' if row.wire_bytes is None else row.wire_bytes:>8}")
    if options.virtual:
        share = row.compared.of_floor
        cells.append(f"{'N/A' if share is None else fixed(share, 7):>7}")
    if options.on_device:
        cells.append(f"{'N/A' if row.moved is None else row.moved.by:>{_MOVED}}")
    if _lossy(options):
        cells += [f"{_error(row, 'max_error'):>9}", f"{_error(row, 'mean_error'):>9}"]
    if len(options.variants) > 1:
        ratios = {f"vs {peer}": row.ratios.get(peer) for peer in options.compare} or {"ratio": row.ratio}
        cells += [
            ("N/A" if ratio is None else fixed(ratio, 7)).rjust(max(7, len(name)))
            for name, ratio in ratios.items()
        ]
        cells.append(f"{row.variant!s:<{_variant_width(options)}}")
    return "  ".join(cells).rstrip()


def footer(report: Report) -> list[str]:
    """Whether values were wrong, and the mean busbw of each variant, as nccl-tests averages it."""
    verdict = "FAILED" if report.wrong else "OK"
    lines = [f"# {'Out of bounds values':<20} : {report.wrong} {verdict}"]
    averages = average_bandwidths(report)
    for variant, bandwidth in averages.items():
        name = f" ({variant})" if len(averages) > 1 else ""
        lines.append(f"# {'Avg bus bandwidth':<20} : {bandwidth:g}{name}")
    lines += [f"# {variant} went over {moved.by}: {moved.why}" for variant, moved in detours(report)]
    return [*lines, "#", f"# Collective test concluded: {report.options.collective}"]


def detours(report: Report) -> list[tuple[str, Moved]]:
    """What did not go the way that one would expect, each variant's ways once."""
    found = [(str(row.variant), row.moved) for row in report.rows if row.moved is not None and row.moved.why]
    return list(dict.fromkeys(found)) if report.options.on_device else []


def average_bandwidths(report: Report) -> dict[str, float]:
    """Mean busbw in GB/s over sizes and both placements, for each variant."""
    found: dict[str, list[float]] = {}
    collective = COLLECTIVES[report.options.collective]
    for row in report.rows:
        for measured in (row.out_of_place, row.in_place):
            if measured is not None:
                _, bus = bandwidths(collective, row.size, measured.timing.seconds, len(report.ranks))
                found.setdefault(str(row.variant), []).append(bus)
    return {variant: sum(values) / len(values) for variant, values in found.items()}


def fixed(value: float, width: int) -> str:
    """``value`` in ``width`` characters: as many of two decimals as fit, an exponent where not even the integer
    does."""
    digits = len(str(int(value))) if value >= 1 else 0
    if digits < width - 2:
        return f"{value:.2f}"
    if digits < width - 1:
        return f"{value:.1f}"
    return f"{value:.0f}" if digits <= width else f"{value:.1e}"


def _place(options: Options, row: Row, measured: Measurement | None, ranks: int) -> str:
    widths = (7, 6, 6, 6) + ((7, 7, 7, 7) if options.per_iter else ())
    if measured is None:
        return "  ".join(f"{'N/A':>{width}}" for width in widths)
    timing = measured.timing
    algorithm, bus = bandwidths(COLLECTIVES[options.collective], row.size, timing.seconds, ranks)
    wrong = "N/A" if measured.verdict is None else f"{float(measured.verdict.wrong):g}"
    cells = [fixed(timing.seconds * 1e6, 7), fixed(algorithm, 6), fixed(bus, 6), wrong]
    if options.per_iter:
        found = timing.statistics
        cells += [fixed(value * 1e6, 7) for value in (found.min, found.max, found.p99)]
        cells.append(fixed(found.variation, 7))
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _error(row: Row, which: str) -> str:
    verdicts = [
        m.verdict for m in (row.out_of_place, row.in_place) if m is not None and m.verdict is not None
    ]
    errors = [getattr(verdict, which) for verdict in verdicts if getattr(verdict, which) is not None]
    return f"{max(errors):.2e}" if errors else "N/A"


def _lossy(options: Options) -> bool:
    return any(codec(variant.codec).name != "none" for variant in options.variants)


def _variant_width(options: Options) -> int:
    return max(len(str(variant)) for variant in options.variants)
