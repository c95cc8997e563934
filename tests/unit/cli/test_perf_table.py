from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import dtcomm
from dtcomm.cli.perf import output, placement
from dtcomm.cli.perf.args import parse
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.placement import RankInfo
from dtcomm.cli.perf.runner import Measurement, PerfReport, PerfRow
from dtcomm.cli.perf.timing import Timing, percentile
from dtcomm.cli.perf.verify import CheckResult


def measurement(microseconds: float, wrong: int = 0, error: float | None = None) -> Measurement:
    iterations = tuple(microseconds * factor * 1e-6 for factor in (0.5, 1.5, 1.0, 1.0))
    check = CheckResult(wrong=wrong, max_error=error, mean_error=error)
    return Measurement(timing=Timing(seconds=microseconds * 1e-6, iterations=iterations), check=check)


def make_report(line: str) -> PerfReport:
    options = parse(line.split())
    report = PerfReport(
        options=options,
        ranks=[RankInfo(rank=r, pid=4000 + r, hostname="host", device=f"cpu {r}") for r in range(2)],
        started=0.0,
        ended=60.0,
    )
    report.backends = {variant.backend: "words" for variant in options.variants}
    call: dict[str, Any] = {"datatype": "float", "op": "sum", "root": -1}
    for size, time in ((1024, 12.5), (1 << 26, 123456.0)):
        for index, variant in enumerate(options.variants):
            error = 0.005 if variant.codec == "int8" else None
            row = PerfRow(
                **(call | {"size": size, "count": size // 4, "variant": variant}),
                wire_bytes=None if variant.backend == "gloo" else size,
                out_of_place=measurement(time * (index + 1), error=error),
                in_place=measurement(time / 2 * (index + 1), error=error),
                ratio=len(options.variants) / (index + 1) if len(options.variants) > 1 else None,
            )
            report.rows.append(row)
    return report


def format_report(report: PerfReport) -> str:
    rows = [output.format_row(report.options, row, len(report.ranks)) for row in report.rows]
    return "\n".join([*output.format_header(report), *rows, *output.format_footer(report)]) + "\n"


GOLDEN = """\
# dtcomm VERSION
# Collective test starting: all_reduce
# minBytes 1024 maxBytes 67108864 step: 65536(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 average: max
# Times are the mean of the slowest rank over the iterations
#
# Using devices
#  Rank  0 Pid   4000 on       host device cpu 0
#  Rank  1 Pid   4001 on       host device cpu 1
# Backend native: words
# Codec none, algorithm auto
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong      wire
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)               (B)
        1024           256     float     sum      -1    12.50    0.08    0.08       0     6.25    0.16    0.16       0      1024
    67108864      16777216     float     sum      -1   123456    0.54    0.54       0  61728.0    1.09    1.09       0  67108864
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.469129
#
# Collective test concluded: all_reduce
"""  # noqa: E501

COMPARISON = """\
        1024           256     float     sum      -1    12.50    0.08    0.08       0     6.25    0.16    0.16       0      1024        N/A        N/A     3.00  native none auto
        1024           256     float     sum      -1    25.00    0.04    0.04       0    12.50    0.08    0.08       0      1024   5.00e-03   5.00e-03     1.50  native int8 auto
        1024           256     float     sum      -1    37.50    0.03    0.03       0    18.75    0.05    0.05       0       N/A        N/A        N/A     1.00  gloo none own
"""  # noqa: E501

ITERATIONS = """\
        1024           256     float     sum      -1    12.50    0.08    0.08       0     6.25    12.50    18.75    18.75    35.36     6.25    0.16    0.16       0     3.12     6.25     9.38     9.38    35.36      1024
"""  # noqa: E501


def test_the_table_of_one_variant() -> None:
    text = format_report(make_report("all_reduce -b 1K -e 64M -f 65536"))
    assert text == GOLDEN.replace("VERSION", dtcomm.__version__)


def right_edges(line: str) -> list[int]:
    return [word.end() for word in re.finditer(r"[^\s#]\S*|#wrong", line)]


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_a_comparison_has_errors_ratios_and_names() -> None:
    report = make_report("all_reduce -b 1K -e 1K --backend native,gloo --codec none --codec int8")
    text = format_report(report)
    assert "\n".join(rows(text)[:3]) + "\n" == COMPARISON
    (heads,) = (line for line in text.splitlines() if line.startswith("#       size"))
    assert heads.split()[-5:] == ["wire", "maxerr", "meanerr", "ratio", "variant"]
    assert format_report(report).count("# Avg bus bandwidth") == 3


def test_statistics_of_the_iterations_follow_each_placement() -> None:
    text = format_report(make_report("all_reduce -b 1K -e 1K -I"))
    assert rows(text)[0] + "\n" == ITERATIONS
    (heads,) = (line for line in text.splitlines() if line.startswith("#       size"))
    assert (
        heads.split()[10:15] == ["i_min", "i_p50", "i_p99", "i_max", "i_cv%"]
        and heads.split().count("i_cv%") == 2
    )


@pytest.mark.parametrize("flags", ["", "-I", "-C -I --codec int8", "--codec int8"])
def test_numbers_are_right_aligned_with_their_headings(flags: str) -> None:
    text = format_report(make_report(f"all_reduce -b 1K -e 64M -f 65536 {flags}"))
    (heads,) = (line for line in text.splitlines() if line.startswith("#       size"))
    for row in rows(text):
        assert right_edges(row) == right_edges(heads)


def test_numbers_are_right_aligned_in_tables_of_peers_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "cuda_available", lambda: True)
    text = format_report(
        make_report("all_reduce -b 1K -e 64M -f 65536 --device cuda --nproc 2 --compare nccl,gloo")
    )
    (heads,) = (line for line in text.splitlines() if line.startswith("#       size"))
    assert "vs gloo" in heads and "moved" in heads
    edges = right_edges(heads.replace("vs ", "vs_"))
    assert all(right_edges(row)[:17] == edges[:17] for row in rows(text))


def test_results_without_a_check_have_no_number_and_wrong_values_fail() -> None:
    report = make_report("all_reduce -b 1K -e 1K -c 0 -O 0")
    row = report.rows[0]
    unchecked = Measurement(timing=row.primary.timing, check=None)
    line = output.format_row(report.options, replace(row, out_of_place=None, in_place=unchecked), 2)
    assert line.split()[5:9] == ["N/A"] * 4 and line.split()[12] == "N/A"
    report.rows[0] = replace(row, in_place=measurement(1.0, wrong=1234567))
    assert "Out of bounds values : 1234567 FAILED" in format_report(report)
    assert "1.23457e+06" in format_report(report)


@pytest.mark.parametrize(
    ("width", "values", "texts"),
    [
        (7, (0.0, 0.19, 9999.994, 12345.67), "0.00 0.19 9999.99 12345.7"),
        (7, (123456.7, 1234567.8, 123456789.0), "123457 1234568 1.2e+08"),
        (6, (123.456, 1234.56), "123.46 1234.6"),
    ],
)
def test_numbers_keep_their_width(width: int, values: tuple[float, ...], texts: str) -> None:
    assert [output.format_fixed(value, width) for value in values] == texts.split()
    assert all(len(text) <= width for text in texts.split())


@pytest.mark.parametrize(
    ("name", "size", "bus"),
    [
        ("all_reduce", 1e9, 1.5),
        ("reduce_scatter", 4e9, 0.75),
        ("all_gather", 4e9, 0.75),
        ("broadcast", 1e9, 1),
    ],
)
def test_bandwidth_formulas_on_four_ranks(name: str, size: float, bus: float) -> None:
    collective = COLLECTIVES[name]
    count = collective.count(int(size), torch.float32, 4)
    assert collective.size(count, torch.float32, 4) == size
    assert bandwidths(collective, int(size), 0.5, 4) == (size / 1e9 * 2, pytest.approx(size / 1e9 * 2 * bus))


def test_shards_are_cut_to_16_bytes_and_nothing_divides_by_zero() -> None:
    gather = COLLECTIVES["all_gather"]
    assert gather.count(1000, torch.float32, 3) == 80 and gather.size(80, torch.float32, 3) == 960
    assert gather.count(8, torch.float64, 2) == 0
    assert bandwidths(gather, 0, 0.0, 2) == (0.0, 0.0)


def test_percentiles_are_values_that_occurred() -> None:
    times = [float(n) for n in range(1, 101)]
    assert (percentile(times, 50), percentile(times, 95), percentile(times, 99)) == (50, 95, 99)
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0], 95) == 3.0


def test_json_has_the_keys_of_nccl_tests_with_real_types_and_no_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "do not print me")
    report = make_report("all_reduce -b 1K -e 1K --codec none --codec int8")
    report.rows[0] = replace(report.rows[0], in_place=measurement(1.0, wrong=3, error=math.nan))
    text = json.dumps(output.as_dict(report, ["all_reduce", "-b", "1K"]), allow_nan=False)
    assert "SECRET" not in text and "do not print" not in text
    document = json.loads(text)
    assert {"version", "start_time", "args", "config", "results", "end_time"} <= document.keys()
    assert document["start_time"] == "1970-01-01T00:00:00+00:00"
    assert document["args"] == ["dtcomm", "perf", "all_reduce", "-b", "1K"]
    assert document["config"]["devices"][1] == {"rank": 1, "pid": 4001, "hostname": "host", "device": "cpu 1"}
    assert document["config"]["blocking_collectives"] is False
    first, second = document["results"][:2]
    call = {"size": 1024, "count": 256, "type": "float", "redop": "sum", "root": -1}
    assert call.items() <= first.items()
    bandwidth = pytest.approx(0.08192)
    measured = {"time": pytest.approx(12.5), "alg_bw": bandwidth, "bus_bw": bandwidth, "nwrong": 0}
    assert first["out_of_place"] == {**measured, "max_error": None, "mean_error": None}
    assert first["in_place"]["nwrong"] == 3 and first["in_place"]["max_error"] is None
    assert second["codec"] == "int8" and second["out_of_place"]["max_error"] == 0.005
    iterations = first["out_of_place_per_iter"]
    assert iterations["times_us"] == pytest.approx([6.25, 18.75, 12.5, 12.5])
    statistics = "min_us max_us avg_us p50_us p95_us p99_us stdev_us cv_pct"
    assert set(statistics.split()) < iterations.keys()
    assert document["out_of_bounds"] == {"count": 3, "okay": False}
