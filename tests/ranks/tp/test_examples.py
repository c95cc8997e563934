"""The examples of tensor, context and pipeline parallelism run, and their loss decreases."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from dtcomm.launch.ranks import run_ranks

EXAMPLES = Path(__file__).parents[3] / "examples"


def run_example(rank: int, ranks: int, name: str, options: dict[str, Any]) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["run"](**options)


def test_tensor_parallel() -> None:
    pytest.importorskip("transformers", reason="pip install transformers")
    (tokens, error), (other_tokens, _) = run_ranks(
        run_example, 2, "tensor_parallel", {"codec": "int8", "tokens": 2}
    )
    assert tokens == other_tokens and len(tokens) == 2
    assert error < 0.05


def test_context_parallel() -> None:
    for losses in run_ranks(
        run_example, 2, "context_parallel", {"codec": "int8", "method": "ring", "steps": 40}
    ):
        assert losses[-1] < 0.8 * losses[0]


def test_pipeline() -> None:
    _, losses = run_ranks(run_example, 2, "pipeline", {"codec": "int8", "steps": 60, "feedback": True})
    assert losses[-1] < 0.8 * losses[0]
