"""Handles as torch.distributed expects them, around those of dtcomm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.errors import CollectiveTimeout

_SHORTEST, _LONGEST = 20e-6, 1e-3  # seconds between two looks at an operation that has a time limit


class Finished(dist.Work):
    """An operation that ran in the call itself."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        return None

    block_current_stream = synchronize

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._outputs))
        return future


class Pending(dist.Work):
    """An operation under way.

    ``last``, what is still to be done with what arrived, is the business of ``work``. ``limit_s`` is the time that
    the caller of the operation gave it, from now; None: the group's, which the engine keeps itself.
    """

    def __init__(
        self, work: collectives.Work, outputs: Sequence[torch.Tensor], limit_s: float | None = None
    ) -> None:
        super().__init__()
        self._work = work
        self._outputs = outputs
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """CollectiveTimeout after ``timeout`` (none, or zero: the operation's own limit); it may still end later."""
        deadline = self._deadline
        if timeout:
            deadline = time.monotonic() + timeout.total_seconds()
        if deadline is not None:
            until(self._work.is_completed, deadline, self._description())
        self._work.wait()
        return True

    def _description(self) -> str:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self._outputs[:4])
        return f"an operation on tensors of shape {shapes or '()'}"

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        if not self._work.is_completed():
            return None
        try:
            self._work.wait()
        except BaseException as error:
            return error
        return None

    def synchronize(self) -> None:
        self._work.wait()

    block_current_stream = synchronize

    def result(self) -> list[torch.Tensor]:
        self._work.wait()
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            outputs = list(self._outputs)

            def give(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
                done.value()  # raises what the operation failed with
                return outputs

            self._future = self._work.get_future().then(give)
        return self._future


def until(over: Callable[[], bool], deadline: float, what: str) -> None:
    """Look again and again, ever more seldom; CollectiveTimeout at the deadline."""
    begun, pause = time.monotonic(), _SHORTEST
    while not over():
        now = time.monotonic()
        if now >= deadline:
            raise CollectiveTimeout(f"{what} did not end within {max(deadline - begun, 0.0):g} s")
        time.sleep(min(pause, deadline - now))
        pause = min(pause * 2, _LONGEST)
