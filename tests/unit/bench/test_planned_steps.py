"""What ``dtcomm plan`` predicts of the training steps that are kept in bench/results, beside the measured ones."""

from __future__ import annotations

import statistics

import pytest

from bench import workload_links
from bench.training import workloads_page
from dtcomm.cli.plan import options as plan_options
from dtcomm.cli.plan import training as plan_training
from dtcomm.planner.cost_model import Table

CODECS = ("fp16", "bf16", "fp8_e4m3", "int8", "int4", "int2", "sign", "topk 1 %", "randk 1 %")


def test_the_planner_predicts_gains_of_codecs_on_slow_links_alone() -> None:
    names = ["none", "torch's bf16 hook", "int8", "PowerSGD rank 4", "topk 1 %, EF21"]
    slow = workloads_page.predictions(6_500_000, 0.1, 1, names)
    fast = workloads_page.predictions(6_500_000, 0.1, 100, names)
    assert slow["none"] == 1 and not {"PowerSGD rank 4", "topk 1 %, EF21"} & set(slow)
    assert slow["int8"] > slow["torch's bf16 hook"] > 1.3
    assert fast["int8"] < 1.1


@pytest.mark.parametrize("gbit", [1, 10])
@pytest.mark.parametrize("workload", ["text", "vision"])
def test_gains_of_codecs_in_ddp(workload: str, gbit: int) -> None:
    """Of the GPT and the ResNet, to which no constant of the planner was fitted."""
    units = workloads_page.read("workloads")["units"]
    parameters = next(unit["parameters"] for key, unit in units.items() if key.startswith(f"{workload} | "))
    kept = workloads_page.read("workload_links")["rows"]
    rows = [row for row in kept if (row["workload"], row["gbit"]) == (workload, gbit)]
    compute = next(row["ms"] for row in rows if row["name"] == workload_links.COMPUTE) / 1e3
    predicted = workloads_page.predictions(parameters, compute, gbit, ["none", *CODECS])
    errors = workloads_page.prediction_errors(rows, predicted)
    assert len(errors) == len(CODECS)
    assert statistics.median(map(abs, errors)) < 0.08
    assert max(map(abs, errors)) < 0.15


@pytest.mark.parametrize("gbit", ["1", "10"])
def test_steps_of_fsdp(gbit: str) -> None:
    """Of a GPT of 12.7 M parameters in four layers, to whose steps nothing was fitted either."""
    kept = workloads_page.read("fsdp_speed")["rows"]
    measured = {row["name"]: row["ms"] for row in kept if row["link"] == gbit}
    names = {
        "none": ("none", "none"),
        "bf16": ("bf16", "bf16"),
        "int8, fp8": ("int8", "fp8_e4m3"),
        "int4": ("int4", "int4"),
    }
    for name, (gradients, parameters) in names.items():
        options = plan_options.parse(
            [
                "reduce_scatter",
                "--between",
                f"{gbit}gbit",
                "--device",
                "cpu",
                "--hosts",
                "2",
                "--per-host",
                "1",
            ]
            + ["--model", f"params=12.7M,layers=4,step_ms={measured['alone']}"]
            + ["--codec", gradients, "--parameters", parameters]
        )
        row = plan_training.of_model(options, Table(), "").rows[-1]
        assert (row.codec, row.parameters) == (gradients, parameters)
        assert row.step.seconds * 1e3 == pytest.approx(measured[name], rel=0.25), name
