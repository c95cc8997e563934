"""The training runs of bench.convergence: every method does what it says, and what is written down is what was run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bench.convergence import planned_runs
from bench.training import page, runs
from bench.training.tasks import TASKS


def drawn(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose brightest of ten pixels is their label, so that no data are needed."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + seed)
    images = torch.randn(16, 1, 8, 8, generator=generator)
    return images, images.flatten(1)[:, :10].argmax(1)


SHORT = dataclasses.replace(TASKS["mlp"], steps=32, batch=drawn, evaluate=lambda model: 1.0)


@pytest.mark.parametrize("name", runs.METHODS)
def test_every_method_learns(name: str) -> None:
    method = runs.METHODS[name]
    result = runs.in_a_loop(SHORT, method, True, 0)
    # randk has sent a third of the elements once, each with what waited behind it.
    assert result["curve"][-1] < result["curve"][0] + 0.05 * name.startswith("randk 1 %")
    compressed = method.every or method.spec != "none"
    assert 0.005 < result["sent"] < (0.6 if compressed else 1.01)


def test_runs_are_listed_once_and_dgc_not_with_adam() -> None:
    keys = [key for key, *_ in planned_runs(list(TASKS), list(runs.METHODS), 2)]
    assert len(set(keys)) == len(keys)
    assert "mlp | DGC 1 % | feedback | seed 1" in keys
    assert "gpt | DGC 1 % | feedback | seed 1" not in keys
    assert "mlp | none | no feedback | seed 0" not in keys


def made(metrics: dict[tuple[str, bool], list[float]]) -> dict[str, Any]:
    return {
        page.key("mlp", method, feedback, seed): {"metric": value, "sent": 0.25, "curve": [1.0]}
        for (method, feedback), values in metrics.items()
        for seed, value in enumerate(values)
    }


def test_verdicts_compare_the_mean_with_uncompressed_s_worst_seed() -> None:
    found = made({("none", True): [2.0, 2.4], ("int8", True): [2.3, 2.5], ("int4", True): [2.4, 2.6]})
    assert page.verdicts(found) == [
        "PASS mlp int8: 2.4; uncompressed 2 to 2.4",
        "MISS mlp int4: 2.5; uncompressed 2 to 2.4",
    ]


def test_tables_have_a_row_a_method_and_say_what_has_not_run() -> None:
    found = made({("none", True): [2.0, 2.4], ("int8", True): [2.0, 3.0], ("int8", False): [4.0, 4.0]})
    ((_, columns, rows),) = page.tables(found)
    by_method = {row[0]: row for row in rows}
    assert columns == ["method", "mlp: sent", "with feedback", "without"]
    assert by_method["int8"] == ["int8", "25 %", "2.5 ± 0.5", "4 ± 0"]
    assert by_method["int4"] == ["int4", "–", "–", "–"]
    assert set(by_method) == set(runs.METHODS)
