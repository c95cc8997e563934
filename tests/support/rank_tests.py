"""Tests whose whole body runs on several ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from dtcomm.launch.ranks import run_ranks

# Gloo rarely drops a connection while it makes a group, before any code of ours runs: such a test is run again.
GLOO_FAULT = "Gloo connectFullMesh failed"
ATTEMPTS = 3


def on_ranks(count: int | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function that each rank calls with its rank, the number of ranks, and the test's parameters.

    Args:
        count: The number of ranks; None: the function's second parameter is one of the test.
        options: Those of `run_ranks`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        name = function.__name__
        function.__name__ = function.__qualname__ = f"rank_of_{name}"
        function.__globals__[function.__name__] = function  # where ranks look for it
        _, ranks, *others = inspect.signature(function).parameters.values()

        def test(**given: Any) -> None:
            number = given[ranks.name] if count is None else count
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    run_ranks(function, number, *(given[parameter.name] for parameter in others), **options)
                    return
                except RuntimeError as error:
                    if GLOO_FAULT not in str(error) or attempt == ATTEMPTS:
                        raise
                    warnings.warn(f"run again: {error}", stacklevel=1)

        test.__name__, test.__module__, test.__doc__ = name, function.__module__, function.__doc__
        test.__signature__ = inspect.Signature([ranks, *others] if count is None else others)  # type: ignore[attr-defined]
        return test

    return decorate
