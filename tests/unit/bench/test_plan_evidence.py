"""Predictions of whole jobs beside published runs, and of set-ups with gradient compression."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from bench import compression_setups, published_runs
from bench.pages import kept


@pytest.fixture(scope="module")
def compared() -> list[published_runs.Compared]:
    return published_runs.compare()


def test_the_median_error_of_rows_that_were_not_fitted(compared: list[published_runs.Compared]) -> None:
    held_out = [abs(item.error) for item in compared if not item.fitted]
    assert len(held_out) >= 10 and statistics.median(held_out) <= published_runs.MOST_ERROR
    by_source = Counter(item.row["source"] for item in compared)
    assert len(by_source) >= 4 and min(by_source.values()) >= 2
    assert {item.row["source"] for item in compared if item.fitted} == {"llm-foundry"}


def test_every_row_has_a_source_and_its_layout_is_possible(compared: list[published_runs.Compared]) -> None:
    sources = published_runs.load()["sources"]
    for item in compared:
        assert item.row["source"] in sources and item.row["published"] > 0
        assert item.step.layout.problem(item.step.job) is None


def test_published_sizes_follow_from_the_shapes() -> None:
    for row in published_runs.load()["rows"]:
        if row["source"] == "megatron-2021":
            billions = published_runs.job_of(row).model.parameters / 1e9
            assert billions == pytest.approx(float(row["model"].split()[1].removesuffix("B")), rel=0.03)


def test_the_kept_result_is_that_of_the_program(compared: list[published_runs.Compared]) -> None:
    result, now = kept("published_runs"), published_runs.summary(compared)
    assert result["held_out"] == now["held_out"] and result["by_source"] == now["by_source"]


def test_the_kept_constants_are_the_fitted_ones(
    compared: list[published_runs.Compared], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = published_runs.compute
    before = {**compute.MATMUL_REACH}
    for name in ("PASSES", "HALF_TOKENS"):
        monkeypatch.setattr(compute, name, getattr(compute, name))
    for name in ("MATMUL_REACH", "ATTENTION_REACH"):
        monkeypatch.setattr(compute, name, dict(getattr(compute, name)))
    fitted = published_runs.fit(compared)
    assert fitted["ampere"] == pytest.approx(before["ampere"], rel=0.05)
    assert fitted["hopper"] == pytest.approx(before["hopper"], rel=0.05)


def test_set_ups_of_gradient_compression_are_counted() -> None:
    found = list(compression_setups.setups("25gbit", "pytorch"))
    now = compression_setups.counts(found)
    row = next(
        row
        for row in kept("compression_setups")["counts"]
        if (row["rate"], row["encoder"]) == ("25gbit", "pytorch")
    )
    assert now == {key: row[key] for key in now} and now["setups"] == 210
    # What was published: top-K never helps, and signs lose with the number of GPUs, because all is gathered.
    assert all(count == 0 for method, count in now["by_method"].items() if method.startswith("topk"))
    signs = [
        setup.speedup
        for setup in found
        if (setup.model, setup.batch, setup.method) == ("ResNet-101", 64, "signsgd:1")
    ]
    assert signs == sorted(signs, reverse=True)
