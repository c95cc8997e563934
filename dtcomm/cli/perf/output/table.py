"""The table on stdout. Its first columns are exactly those of nccl-tests, so that parsers of these work."""

from __future__ import annotations

import dtcomm
from dtcomm.cli.perf.args import Options
from dtcomm.cli.perf.backends.base import TransportUsed
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.report import Measurement, Report, Row
from dtcomm.codecs import codec

_TRANSPORT_WIDTH = len("fused:double_tree")  # the column's width


def format_header(report: Report) -> list[str]:
    """Return the lines above the rows: version, parameters, ranks, backends, warnings and column heads."""
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
        lines.append("# Per-Iteration Report: i_* columns are of the slowest rank in each iteration")
    lines += ["#", "# Using devices"]
    lines += [
        f"#  Rank {rank.rank:2d} Pid {rank.pid:6d} on {rank.hostname:>10} device {rank.device}"
        for rank in report.ranks
    ]
    if options.device_why:
        lines.append(f"# Device {options.device}: {options.device_why}")
    lines += [
        f"# Backend {name}: {description}" for name, description in report.backends.items() if description
    ]
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
    columns = case + place + place + _dtcomm_heads(options)
    width = len("  ".join(head for head, _ in place))
    above = f"{'out-of-place':^{width}}  {'in-place':^{width}}"
    return [
        ("#" + " " * len("  ".join(head for head, _ in case)) + " " + above).rstrip(),
        "  ".join(head for head, _ in columns).rstrip(),
        "  ".join(unit for _, unit in columns).rstrip(),
    ]


def _dtcomm_heads(options: Options) -> list[tuple[str, str]]:
    heads = [("    wire", "     (B)")]
    if options.virtual:
        heads.append(("  floor", "       "))
    if options.on_device:
        heads.append(("moved".rjust(_TRANSPORT_WIDTH), " " * _TRANSPORT_WIDTH))
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


def format_row(options: Options, row: Row, ranks: int) -> str:
    """Return one line of the table."""
    cells = [f"{row.size:12d}  {row.count:12d}  {row.datatype:>8}  {row.op:>6}  {row.root:6d}"]
    cells += [
        _measurement_cells(options, row, measured, ranks) for measured in (row.out_of_place, row.in_place)
    ]
    cells.append(f"{'N/A' if row.wire_bytes is None else row.wire_bytes:>8}")
    if options.virtual:
        share = row.primary.memory_floor_share
        cells.append(f"{'N/A' if share is None else format_fixed(share, 7):>7}")
    if options.on_device:
        cells.append(f"{'N/A' if row.transport is None else row.transport.name:>{_TRANSPORT_WIDTH}}")
    if _lossy(options):
        cells += [f"{_error(row, 'max_error'):>9}", f"{_error(row, 'mean_error'):>9}"]
    if len(options.variants) > 1:
        ratios = {f"vs {peer}": row.ratios.get(peer) for peer in options.compare} or {"ratio": row.ratio}
        cells += [
            ("N/A" if ratio is None else format_fixed(ratio, 7)).rjust(max(7, len(name)))
            for name, ratio in ratios.items()
        ]
        cells.append(f"{row.variant!s:<{_variant_width(options)}}")
    return "  ".join(cells).rstrip()


def format_footer(report: Report) -> list[str]:
    """Return the lines below the rows: wrong values and the mean busbw of each variant, as in nccl-tests."""
    verdict = "FAILED" if report.wrong else "OK"
    lines = [f"# {'Out of bounds values':<20} : {report.wrong} {verdict}"]
    averages = average_bandwidths(report)
    for variant, bandwidth in averages.items():
        name = f" ({variant})" if len(averages) > 1 else ""
        lines.append(f"# {'Avg bus bandwidth':<20} : {bandwidth:g}{name}")
    lines += [
        f"# {variant} used {transport.name}: {transport.reason}"
        for variant, transport in unexpected_transports(report)
    ]
    return [*lines, "#", f"# Collective test concluded: {report.options.collective}"]


def unexpected_transports(report: Report) -> list[tuple[str, TransportUsed]]:
    """Return each variant's unexpected transports, without duplicates."""
    transports = [
        (str(row.variant), row.transport)
        for row in report.rows
        if row.transport is not None and row.transport.reason
    ]
    return list(dict.fromkeys(transports)) if report.options.on_device else []


def average_bandwidths(report: Report) -> dict[str, float]:
    """Return each variant's mean busbw in GB/s over sizes, out of place and in place."""
    by_variant: dict[str, list[float]] = {}
    collective = COLLECTIVES[report.options.collective]
    for row in report.rows:
        for measured in (row.out_of_place, row.in_place):
            if measured is not None:
                _, bus = bandwidths(collective, row.size, measured.timing.seconds, len(report.ranks))
                by_variant.setdefault(str(row.variant), []).append(bus)
    return {variant: sum(values) / len(values) for variant, values in by_variant.items()}


def format_fixed(value: float, width: int) -> str:
    """Format ``value`` in ``width`` characters with up to two decimals, or an exponent if it does not fit."""
    digits = len(str(int(value))) if value >= 1 else 0
    if digits < width - 2:
        return f"{value:.2f}"
    if digits < width - 1:
        return f"{value:.1f}"
    return f"{value:.0f}" if digits <= width else f"{value:.1e}"


def _measurement_cells(options: Options, row: Row, measured: Measurement | None, ranks: int) -> str:
    widths = (7, 6, 6, 6) + ((7, 7, 7, 7) if options.per_iter else ())
    if measured is None:
        return "  ".join(f"{'N/A':>{width}}" for width in widths)
    timing = measured.timing
    algorithm, bus = bandwidths(COLLECTIVES[options.collective], row.size, timing.seconds, ranks)
    wrong = "N/A" if measured.check is None else f"{float(measured.check.wrong):g}"
    cells = [format_fixed(timing.seconds * 1e6, 7), format_fixed(algorithm, 6), format_fixed(bus, 6), wrong]
    if options.per_iter:
        statistics = timing.statistics
        cells += [format_fixed(v * 1e6, 7) for v in (statistics.min, statistics.max, statistics.p99)]
        cells.append(format_fixed(statistics.variation, 7))
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _error(row: Row, which: str) -> str:
    errors = [getattr(check, which) for check in row.checks if getattr(check, which) is not None]
    return f"{max(errors):.2e}" if errors else "N/A"


def _lossy(options: Options) -> bool:
    return any(codec(variant.codec).name != "none" for variant in options.variants)


def _variant_width(options: Options) -> int:
    return max(len(str(variant)) for variant in options.variants)
