"""Calibration: the errors are those of the model, the plan is within its budget, and `compress` reads it."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dtcomm import tp
from dtcomm.cli.demo import train as demo
from dtcomm.cli.main import main
from dtcomm.extensions.calibrate.calibration import calibrate
from dtcomm.extensions.calibrate.emulate import emulate, restore
from dtcomm.launch.ranks import run_ranks
from tests.extensions.ranks.calibrate.test_emulate import PLAN, SHAPE

LAYER_KINDS = {**PLAN, "head": "column_gather"}
SENDING_LAYERS = ["blocks.0.projection", "blocks.0.down", "head"]


def make_model() -> demo.GPT:
    """A random model whose outputs vary enough for the perplexity to react."""
    torch.manual_seed(0)
    model = demo.GPT(SHAPE)
    nn.init.normal_(model.head.weight, std=0.5)
    return model


@functools.cache
def batches() -> list[torch.Tensor]:
    model = make_model()
    with torch.no_grad():
        tokens = torch.randint(20, (4, 17), generator=torch.Generator().manual_seed(1))
        # Targets are the model's own predictions, so that any error increases the perplexity.
        for position in range(1, 17):
            tokens[:, position] = model(tokens[:, :position])[:, -1].argmax(-1)
    return [tokens[:2], tokens[2:]]


def model_batches_and_plan() -> tuple[nn.Module, list[torch.Tensor], dict[str, str]]:
    return make_model(), batches(), LAYER_KINDS


def test_the_plan_has_the_fewest_bits_within_its_budget() -> None:
    dense = make_model()
    state_before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    codecs = ["int8", "int4", "int2"]
    calibrations = {
        budget: calibrate(dense, batches(), 2, LAYER_KINDS, codecs=codecs, budget=budget)
        for budget in (0, 0.02, 1e9)
    }
    assert list(calibrations[0].errors) == SENDING_LAYERS
    errors = calibrations[0].errors
    for name in SENDING_LAYERS:
        # More bits give less error, of the expected magnitude.
        relative = [errors[name][spec].relative for spec in codecs]
        assert relative == sorted(relative) and 1e-3 < relative[0] < 0.02 < relative[1] < 0.2 < relative[2]
        assert errors[name]["int2"].divergence > errors[name]["int8"].divergence > 0
    assert all(result.plan_error.perplexity <= budget for budget, result in calibrations.items())
    assert calibrations[1e9].mean_bits == pytest.approx(2.5) and not calibrations[1e9].high_precision
    assert calibrations[0.02].mean_bits < 32 and calibrations[0].mean_bits >= calibrations[0.02].mean_bits
    # The reported error of the plan is reproduced.
    layers = emulate(dense, 2, calibrations[0.02].layers, "none")
    with torch.no_grad():
        loss = sum(float(demo.cross_entropy(dense, batch[:, :-1], batch[:, 1:])) for batch in batches()) / 2
    restore(dense, layers)
    assert float(torch.tensor(loss).exp()) == pytest.approx(
        calibrations[0.02].perplexity * (1 + calibrations[0.02].plan_error.perplexity), rel=1e-5
    )
    assert all(torch.equal(tensor, state_before[name]) for name, tensor in dense.state_dict().items())
    assert dense.training


def test_compress_reads_the_plan_that_the_command_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    model = f"{__name__}:model_batches_and_plan"
    arguments = f"tp calibrate {model} --codecs int8 int3 --quiet --budget 5 --out {plan}".split()
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "blocks.0.down" in output and "bits per element on the wire" in output
    assert main([*arguments, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["errors"]["head"]["int3"]["relative"] > result["errors"]["head"]["int8"]["relative"]
    assert result["layers"] == json.loads(plan.read_text())["layers"]
    reports = run_ranks(convert, 2, str(plan))
    assert reports[0] == {name: entry["codec"] for name, entry in result["layers"].items() if entry["codec"]}


def convert(rank: int, ranks: int, plan: str) -> dict[str, str]:
    model = make_model()
    report = tp.compress(model, None, "int8", plan)
    assert str(model.get_submodule("head").comm.codec) == report.codecs["head"]
    return report.codecs


def test_invalid_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is not a plan: expected format 'dtcomm tp plan 1'"):
        calibrate(make_model(), batches(), 2, tmp_path / "bad.json")
    with pytest.raises(ValueError, match="batches: expected at least one"):
        calibrate(make_model(), [], 2, LAYER_KINDS)
    with pytest.raises(ValueError, match="budget: expected 0 or more, got -1"):
        calibrate(make_model(), batches(), 2, LAYER_KINDS, budget=-1)
    with pytest.raises(ValueError, match="plan: none of its layers sends activations"):
        calibrate(make_model(), batches(), 2, {"blocks.*.before_mlp": "replicated"})
    assert main(["tp", "calibrate", "nowhere:model"]) == 2
    assert "MODEL: nowhere:model: No module named 'nowhere'" in capsys.readouterr().err
    assert main(["tp", "calibrate", str(tmp_path)]) == 2
    assert "no causal language model" in capsys.readouterr().err
