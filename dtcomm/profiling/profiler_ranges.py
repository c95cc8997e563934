"""Ranges in the traces of torch.profiler; without a running profiler they cost next to nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


def profiler_is_active() -> bool:
    """Return whether torch.profiler or torch.autograd.profiler runs on this thread."""
    return torch._C._autograd._profiler_enabled()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a context manager that shows its block as the range ``dtcomm::name``."""
    return torch.profiler.record_function(f"dtcomm::{name}") if profiler_is_active() else nullcontext()


class AsyncRange:
    """A range that begins here and ends with a future, on whatever thread completes it."""

    def __init__(self, name: str) -> None:
        self._range = torch.profiler.record_function(f"dtcomm::{name}") if profiler_is_active() else None
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def until(self, future: torch.futures.Future[T]) -> torch.futures.Future[T]:
        """End the range with ``future``; returns a future to use in its place."""
        if self._range is None:
            return future
        chained: torch.futures.Future[T] = self._range._call_end_callbacks_on_future(future)
        self._range.__exit__(None, None, None)
        return chained

    def end(self) -> None:
        """End the range now, if there is no future."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
