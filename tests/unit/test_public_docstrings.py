"""Public functions document every argument, and the examples in docstrings of pure functions run."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

import dtcomm

# Modules whose examples need no process group of several ranks.
WITH_EXAMPLES = (
    "algorithms.registry",
    "codecs.spec",
    "collectives.group_ops",
    "planner.compression_payoff",
    "planner.cost_model",
    "planner.select_algorithm",
    "schedule.ir",
    "schedule.lower",
    "schedule.simulate",
    "schedule.text",
    "schedule.verify",
)
FUNCTIONS = [name for name in dtcomm.__all__ if inspect.isfunction(getattr(dtcomm, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_documented(name: str) -> None:
    function = getattr(dtcomm, name)
    text = inspect.getdoc(function) or ""
    missing = [
        parameter for parameter in inspect.signature(function).parameters if f"{parameter}: " not in text
    ]
    assert not missing, f"{name} does not document {', '.join(missing)}"
    assert "Example:" in text, f"{name} has no example"


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_run(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"dtcomm.{module}"))
    assert results.attempted and not results.failed
