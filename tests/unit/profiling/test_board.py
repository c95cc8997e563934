"""The board of Grafana shows metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dtcomm.compress.measurements import Fidelity
from dtcomm.profiling import Metric, Timeline
from tests.unit.compress.test_report import make_report, make_row
from tests.unit.profiling.steps import step

BOARD = Path(__file__).parents[3] / "examples/grafana/dtcomm.json"


def state_with_all_metrics() -> Any:
    """Return an object whose metrics are all that a report and a timeline can have."""
    fidelity = Fidelity(steps=24, cosine=0.98, norm_ratio=1.02)
    report = make_report(make_row(relative_error=0.1), events={"harm": 1}, fidelity=fidelity)
    timeline = Timeline("ddp")
    timeline._steps.extend([step(1)])

    class State:
        def metrics(self) -> list[Metric]:
            return report.metrics() + timeline.metrics()

    return State()


def test_every_metric_and_label_on_the_board_exists() -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    metrics = state_with_all_metrics().metrics()
    labels: dict[str, set[str]] = {}
    for metric in metrics:
        labels.setdefault(metric.name, set()).update(metric.labels)
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    shown = {name for text in expressions for name in re.findall(r"\bdtcomm_\w+", text)}
    assert shown <= labels.keys(), sorted(shown - labels.keys())
    assert len(shown) >= 9
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            names = re.findall(r"\bdtcomm_\w+", target["expr"])
            # What a legend shows is a label of the metric, or one that the exporter of each rank adds.
            used = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            assert used <= labels[names[0]] | {"rank", "job", "instance"}, target
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
