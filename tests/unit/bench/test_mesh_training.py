"""bench.mesh_training: its cases are meshes of the example, and its verdicts follow the losses."""

from __future__ import annotations

import argparse
import math
import runpy
from typing import Any

import pytest

import dtcomm
from bench import mesh_training
from bench.mesh_training import CASES, ONE_RANK, ONE_RANK_EXPERTS, compare, key


@pytest.mark.parametrize("name", CASES)
def test_axes_have_the_ranks_of_the_case(name: str) -> None:
    case = CASES[name]
    options: argparse.Namespace = runpy.run_path(str(mesh_training.EXAMPLE))["parse"](case.axes.split())
    assert math.prod(getattr(options, axis) for axis in dtcomm.mesh.AXES) == case.ranks
    assert case.base == (ONE_RANK_EXPERTS if options.experts else ONE_RANK)


def runs(losses: dict[str, list[float]]) -> dict[str, Any]:
    return {
        key(name, seed): {"loss": loss, "sent": {}}
        for name, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    }


@pytest.mark.parametrize(("losses", "verdict"), [([2.0, 2.3], "PASS"), ([2.2, 2.21], "MISS")])
def test_the_mean_may_rise_by_the_spread_of_the_seeds(losses: list[float], verdict: str) -> None:
    base, compressed = compare(runs({ONE_RANK: [2.0, 2.1], "dp": losses}), seeds=2)
    assert (base["name"], base["verdict"], base["spread"]) == (ONE_RANK, "", 0.1)
    assert (compressed["name"], compressed["verdict"]) == ("dp", verdict)


def test_a_case_without_all_seeds_has_no_row() -> None:
    assert [row["name"] for row in compare(runs({ONE_RANK: [2.0, 2.1], "dp": [2.0]}), seeds=2)] == [ONE_RANK]
