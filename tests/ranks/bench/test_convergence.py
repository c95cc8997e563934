"""The training runs of bench.convergence: every method learns; tables and verdicts follow from results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bench.convergence import planned_runs
from bench.training import page, runs
from bench.training.tasks import TASKS


def random_batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images labelled with the brightest of their first ten pixels, so that no data set is needed."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + seed)
    images = torch.randn(16, 1, 8, 8, generator=generator)
    return images, images.flatten(1)[:, :10].argmax(1)


SHORT = dataclasses.replace(TASKS["mlp"], steps=32, batch=random_batch, evaluate=lambda model: 1.0)


COMMON = ("int2",)  # the others take as long and are marked slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COMMON else pytest.mark.slow) for name in runs.METHODS]
)
def test_every_method_learns(name: str) -> None:
    method = runs.METHODS[name]
    result = runs.in_a_loop(SHORT, method, True, 0)
    # randk has sent only a third of the elements by then, so its loss may rise a little.
    assert result["curve"][-1] < result["curve"][0] + 0.05 * name.startswith("randk 1 %")
    compressed = method.every or method.spec != "none"
    assert 0.005 < result["sent"] < (0.6 if compressed else 1.01)


def test_each_run_is_planned_once_and_dgc_never_with_adam() -> None:
    keys = [key for key, *_ in planned_runs(list(TASKS), list(runs.METHODS), 2)]
    assert len(set(keys)) == len(keys)
    assert "mlp | DGC 1 % | feedback | seed 1" in keys
    assert "gpt | DGC 1 % | feedback | seed 1" not in keys
    assert "mlp | none | no feedback | seed 0" not in keys


def results_of(metrics: dict[tuple[str, bool], list[float]]) -> dict[str, Any]:
    return {
        page.key("mlp", method, feedback, seed): {"metric": value, "sent": 0.25, "curve": [1.0]}
        for (method, feedback), values in metrics.items()
        for seed, value in enumerate(values)
    }


def test_verdicts_compare_the_mean_with_the_worst_uncompressed_seed() -> None:
    results = results_of({("none", True): [2.0, 2.4], ("int8", True): [2.3, 2.5], ("int4", True): [2.4, 2.6]})
    assert page.verdicts(results) == [
        "PASS mlp int8: 2.4; uncompressed 2 to 2.4",
        "MISS mlp int4: 2.5; uncompressed 2 to 2.4",
    ]


def test_table_has_a_row_per_method_and_a_dash_where_nothing_ran() -> None:
    results = results_of(
        {("none", True): [2.0, 2.4], ("int8", True): [2.0, 3.0], ("int8", False): [4.0, 4.0]}
    )
    ((_, columns, rows),) = page.tables(results)
    by_method = {row[0]: row for row in rows}
    assert columns == ["method", "mlp: sent", "with feedback", "without"]
    assert by_method["int8"] == ["int8", "25 %", "2.5 ± 0.5", "4 ± 0"]
    assert by_method["int4"] == ["int4", "–", "–", "–"]
    assert set(by_method) == set(runs.METHODS)
