"""The training runs of bench.fsdp_convergence, shortened: every spec learns, and the page has a row per spec."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.fsdp_convergence import DEFAULTS, task_of, train
from bench.training import shards_page
from bench.training.shards import METHODS
from bench.training.tasks import TASKS
from dtcomm.cli.demo import train as demo

SHAPE = demo.ModelShape(vocabulary=11, context=8, layers=2, width=16, heads=2)


def random_batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences of consecutive symbols, so that no text is needed."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + seed)
    first = torch.randint(11, (4, 1), generator=generator)
    symbols = (first + torch.arange(9)) % 11
    return symbols[:, :-1], symbols[:, 1:]


SHORT = dataclasses.replace(
    TASKS["gpt"],
    steps=12,
    rate=2e-2,
    batch=random_batch,
    evaluate=lambda model: 1.0,
    model=lambda: demo.GPT(SHAPE),
)


@pytest.mark.slow
def test_every_spec_learns_and_sends_less() -> None:
    runs: dict[str, Any] = {}
    for name, method in METHODS.items():
        result = runs[shards_page.key(name, 0)] = train(SHORT, method, 0)
        assert result["curve"][-1] < result["curve"][0] - 0.2, name
        assert result["sent"] == pytest.approx(1.0) if name == "uncompressed" else result["sent"] < 0.9, name
    _, columns, rows = shards_page.table(runs)
    assert [row[0] for row in rows] == list(METHODS) and len(columns) == len(rows[0])
    assert len(shards_page.verdicts(runs)) == 2


def test_verdicts_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = {
        shards_page.key(name, seed): {
            "metric": 2.0 + 0.05 * (name == "defaults"),
            "curve": [3.0, 2.0],
            "sent": 0.5,
        }
        for name in METHODS
        for seed in range(2)
    }
    missed, passed = shards_page.verdicts(runs)
    assert missed.startswith("MISS defaults: +2.50 %") and passed.startswith("PASS int8, fp8: +0.00 %")
    shards_page.plot(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_table_of_one_seed_states_no_spread() -> None:
    one = {shards_page.key(name, 0): {"metric": 2.0, "sent": 0.5} for name in METHODS}
    title, columns, rows = shards_page.table(one)
    assert title == "held-out loss in nats per symbol, one seed"
    assert {row[columns.index("held-out loss")] for row in rows} == {"2.0000"}
    assert {row[columns.index("beside uncompressed")] for row in rows} == {"+0.00 %"}


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_the_models_of_both_tasks_have_blocks_that_are_sharded_alone(name: str) -> None:
    task = task_of(name, steps=7)
    assert task.steps == 7 and task.adam
    model = task.model()
    assert isinstance(model, demo.GPT)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (parameters > 6e6) == (name == "text")
