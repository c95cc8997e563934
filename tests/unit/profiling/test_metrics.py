"""Metrics in Prometheus's text format and as TensorBoard scalars."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from dtcomm.profiling import Metric, log_metrics, prometheus, write_prometheus

SAMPLE = re.compile(
    r'^[a-z_]+(\{[a-z]+="(\\.|[^"\\\n])*"(,[a-z]+="(\\.|[^"\\\n])*")*\})? (-?[0-9.e+-]+|NaN|[+-]Inf)$'
)


class StateWithMetrics:
    def __init__(self, *metrics: Metric) -> None:
        self._metrics = list(metrics)

    def metrics(self) -> list[Metric]:
        return self._metrics


STATE = StateWithMetrics(
    Metric("dtcomm_bytes_total", 2**40, "bytes\nsent", "counter"),
    Metric("dtcomm_error", 0.25, "lost", labels={"codec": "int8", "note": 'a "name" \\ of\nmine'}),
    Metric("dtcomm_share", math.nan, "shared"),
    Metric("dtcomm_error", 1e-9, "lost", labels={"codec": "topk"}),
)


def test_prometheus_text_is_well_formed_and_grouped_by_name() -> None:
    text = prometheus(STATE, {"rank": "0"})
    assert text.endswith("\n")
    for line in text.splitlines():
        assert line.startswith("# ") or SAMPLE.match(line), line
    assert text.count("# TYPE dtcomm_error gauge") == 1
    assert "# HELP dtcomm_bytes_total bytes\\nsent\n# TYPE dtcomm_bytes_total counter\n" in text
    assert f'dtcomm_bytes_total{{rank="0"}} {2**40}' in text
    assert 'note="a \\"name\\" \\\\ of\\nmine"} 0.25\ndtcomm_error{rank="0",codec="topk"} 1e-09\n' in text
    assert 'dtcomm_share{rank="0"} NaN' in text


def test_the_text_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "dtcomm.prom"
    path.write_text("old")
    reader = path.open()
    write_prometheus(STATE, path)
    assert reader.read() == "old"  # a reader that has the file open still reads the old content
    assert path.read_text() == prometheus(STATE)
    assert [file.name for file in tmp_path.iterdir()] == ["dtcomm.prom"]
    with pytest.raises(ValueError, match=r"\.prom"):
        write_prometheus(STATE, tmp_path / "dtcomm.txt")


def test_tensorboard_gets_all_finite_values() -> None:
    class Writer:
        scalars: list[tuple[str, float, int | None]] = []  # noqa: RUF012

        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
            self.scalars.append((tag, scalar_value, global_step))

    writer = Writer()
    labels = {"message": "bucket 0", "codec": "int8/int4:block=64"}
    metrics = [
        *(STATE.metrics()[index] for index in (0, 2, 3)),
        Metric("dtcomm_error", 0.5, "lost", labels=labels),
    ]
    log_metrics(StateWithMetrics(*metrics), writer, 12)
    assert writer.scalars == [
        ("dtcomm/bytes_total", 2**40, 12),
        ("dtcomm/error/topk", 1e-9, 12),
        ("dtcomm/error/bucket_0/int8_int4_block_64", 0.5, 12),
    ]
