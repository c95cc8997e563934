"""Handles with the interface of `torch.distributed.Work`, around those of dtcomm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.errors import CollectiveTimeout

_MIN_POLL_S, _MAX_POLL_S = 20e-6, 1e-3  # pauses between two polls of an operation with a time limit


class CompletedWork(dist.Work):
    """An operation that completed within the call that started it."""

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


class TorchWork(dist.Work):
    """An operation in progress.

    Args:
        work: dtcomm's handle; waiting for it leaves the outputs complete.
        outputs: The output tensors.
        limit_s: Time limit in seconds, counted from now. None: the group's timeout, which the runtime enforces.
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
        """Wait for completion.

        Args:
            timeout: Time limit of this call; None or zero: the operation's own limit.

        Raises:
            CollectiveTimeout: The time limit has passed. The operation may still complete later.
        """
        deadline = self._deadline
        if timeout:
            deadline = time.monotonic() + timeout.total_seconds()
        if deadline is not None:
            poll_until(self._work.is_completed, deadline, self._description())
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

            def outputs_of(completed: torch.futures.Future[Any]) -> list[torch.Tensor]:
                completed.value()  # raises the operation's error
                return outputs

            self._future = self._work.get_future().then(outputs_of)
        return self._future


class CoalescedWork(dist.Work):
    """Several operations as one, complete when all are; each keeps its own time limit."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])

        def outputs_of(completed: torch.futures.Future[Any]) -> list[torch.Tensor]:
            return [tensor for future in completed.value() for tensor in future.value()]

        return futures.then(outputs_of)


def poll_until(is_completed: Callable[[], bool], deadline: float, description: str) -> None:
    """Poll with growing pauses until completion; CollectiveTimeout at the deadline (of ``time.monotonic``)."""
    begin, pause = time.monotonic(), _MIN_POLL_S
    while not is_completed():
        now = time.monotonic()
        if now >= deadline:
            raise CollectiveTimeout(f"{description} did not end within {max(deadline - begin, 0.0):g} s")
        time.sleep(min(pause, deadline - now))
        pause = min(pause * 2, _MAX_POLL_S)
