"""Ranges in torch.profiler's traces, while one runs; nobody else pays for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


def profiled() -> bool:
    """Whether torch.profiler, or torch.autograd.profiler, runs on this thread."""
    return torch._C._autograd._profiler_enabled()


def during(name: str) -> AbstractContextManager[object]:
    """A range ``dtcomm::name`` around a block."""
    return torch.profiler.record_function(f"dtcomm::{name}") if profiled() else nullcontext()


class UnderWay:
    """A range that begins here and ends with a future, on whatever thread that is completed."""

    def __init__(self, name: str) -> None:
        self._range = torch.profiler.record_function(f"dtcomm::{name}") if profiled() else None
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def until(self, future: torch.futures.Future[T]) -> torch.futures.Future[T]:
        """A future to use in place of ``future``."""
        if self._range is None:
            return future
        followed: torch.futures.Future[T] = self._range._call_end_callbacks_on_future(future)
        self._range.__exit__(None, None, None)
        return followed

    def end(self) -> None:
        """Here: there was no future."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
