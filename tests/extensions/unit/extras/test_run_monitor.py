"""FLOPs, MFU, the metrics of a run, and that the board shows metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtcomm.compress.measurements import Fidelity
from dtcomm.extensions.extras import (
    AxisShare,
    RankSpeed,
    RunMonitor,
    count_flops,
    peak_flops,
    transformer_flops,
)
from dtcomm.profiling import Metric, Timeline
from tests.unit.compress.test_report import make_report, make_row
from tests.unit.profiling.steps import step

BOARD = Path(__file__).parents[4] / "examples/grafana/dtcomm.json"


def test_flops_are_those_of_the_products() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    forward = 2 * 8 * (64 * 32 + 32 * 16)
    # The gradient of the first layer's input is not needed.
    backward = 2 * forward - 2 * 8 * 64 * 32
    inputs = torch.empty(8, 64)
    assert count_flops(model, inputs, backward=False) == forward
    assert count_flops(model, inputs) == forward + backward
    assert all(not parameter.is_meta for parameter in model.parameters())


def test_counted_and_estimated_flops_of_a_transformer_agree() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    products = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    estimated = transformer_flops(products, 4 * 32, layers=2, width=64, length=32)
    counted = count_flops(model, torch.empty(4, 32, 64).requires_grad_())
    assert counted == pytest.approx(estimated, rel=0.05)
    half = transformer_flops(products, 128, layers=2, width=64, length=32, causal=True)
    assert estimated - half == 128 * 6 * 2 * 64 * 32


def test_models_that_read_values_are_refused() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(RuntimeError, match=r"Reads does not run on the meta device.*transformer_flops"):
        count_flops(Reads(), torch.ones(2))
    with pytest.raises(ValueError, match="layers: expected 0 or more"):
        transformer_flops(1, 1, layers=-1)


def test_peaks_are_those_of_the_planner() -> None:
    assert peak_flops("h100") == 989.4e12
    assert peak_flops("A100", "tf32") == 156e12
    with pytest.raises(ValueError, match=r"device: .*a100"):
        peak_flops("abacus")
    with pytest.raises(ValueError, match="no peak"):
        peak_flops("cpu")
    with pytest.raises(ValueError, match="dtype: v100: 'bf16' is not one of fp32, fp16"):
        peak_flops("v100")


def monitor_with_values(**options: Any) -> RunMonitor:
    """Return a monitor as it is after 40 steps of 0.1 s on four ranks, of which rank 2 is slow."""
    monitor = RunMonitor(flops=3e12, peak="h100", tokens=4096, **options)
    monitor._steps, monitor._times = 40, type(monitor._times)([0.1] * 20)
    monitor._own_s = 0.06
    monitor._axes = (
        AxisShare(axis="dp", operations=4, seconds=0.03, share=0.3),
        AxisShare(axis="tp", operations=16, seconds=0.01, share=0.1),
    )
    monitor._speeds = tuple(
        RankSpeed(rank=rank, samples=1, sample_s=0.09 if rank == 2 else 0.06, wait_s=0.01)
        for rank in range(4)
    )
    monitor._norm, monitor._loss = torch.tensor(1.5), 2.25
    return monitor


def test_a_report_says_what_was_reached_and_who_is_slow() -> None:
    report = monitor_with_values().report()
    assert report.mfu == pytest.approx(3e12 / 0.1 / 989.4e12)
    assert report.tokens_per_second == pytest.approx(40960)
    assert report.efficiency == pytest.approx(0.6)
    assert [(straggler.rank, straggler.factor) for straggler in report.stragglers] == [
        (2, pytest.approx(1.5))
    ]
    assert str(report).splitlines() == [
        "run: 40 steps of 100 ms, efficiency 60.0%, MFU 3.0% of 989.4 TFLOP/s, 40,960 tokens/s, gradient norm 1.5, "
        "loss 2.25",
        "axis  operations  ms  share",
        "dp             4  30  30.0%",
        "tp            16  10  10.0%",
        "slow: rank 2: slow compute, 1.5 times the median rank's time",
    ]
    assert json.loads(json.dumps(report.to_dict()))["axes"][1]["axis"] == "tp"


def test_a_run_without_ranks_is_measured() -> None:
    monitor = RunMonitor(every=0)
    assert str(monitor.report()) == "run: no step was measured yet"
    for loss in (3.0, 2.0):
        monitor.step(loss=loss)
    report = monitor.report()
    assert (report.steps, report.loss, report.mfu, report.axes) == (2, 2.0, None, ())
    assert report.step_s > 0 and 0 < report.efficiency <= 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"flops": -1.0}, ValueError, "flops: expected 0 or more"),
        ({"every": 2.5}, TypeError, "every: expected an integer"),
        ({"axes": {"dp": "world"}}, TypeError, "axes: dp: expected a process group or a mesh, got str"),
        ({"axes": 3}, TypeError, "axes: expected a mapping or a DeviceMesh"),
        ({"states": {"dp": object()}}, TypeError, r"states: dp: expected an object with metrics\(\)"),
        ({"peak": "abacus"}, ValueError, "device: "),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RunMonitor(**options)


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


def test_every_metric_on_the_board_exists_and_every_axis_label_too() -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    metrics = monitor_with_values(states={"dp": state_with_all_metrics()}).metrics()
    labels: dict[str, set[str]] = {}
    for metric in metrics:
        labels.setdefault(metric.name, set()).update(metric.labels)
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    shown = {name for text in expressions for name in re.findall(r"\bdtcomm_\w+", text)}
    assert shown <= labels.keys(), sorted(shown - labels.keys())
    assert len(shown) >= 12
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            names = re.findall(r"\bdtcomm_\w+", target["expr"])
            # What a legend shows is a label of the metric, or one that the exporter of each rank adds.
            used = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            assert used <= labels[names[0]] | {"rank", "job", "instance"}, target
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
