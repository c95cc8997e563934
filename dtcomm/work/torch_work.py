"""`TorchWork`, a handle with the interface of ``torch.distributed.Work``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import future_completion
from dtcomm.errors import CollectiveTimeout
from dtcomm.work.handles import Work

_MIN_POLL_S, _MAX_POLL_S = 20e-6, 1e-3  # pauses between two polls of an operation with a time limit


class TorchWork(dist.Work):
    """A handle with the interface of ``torch.distributed.Work`` around one of dtcomm.

    Args:
        work: The handle; waiting for it leaves the outputs complete.
        outputs: The output tensors.
        limit_s: Time limit in seconds, counted from now. None: the group's timeout, which the runtime enforces.
    """

    _deadline: float | None = None
    _future: torch.futures.Future[Any] | None = None

    def __init__(self, work: Work, outputs: Sequence[torch.Tensor], limit_s: float | None = None) -> None:
        super().__init__()
        self.outputs = outputs
        self._work = work
        if limit_s is not None:
            self._deadline = time.monotonic() + limit_s

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
            self._poll_until(deadline)
        self._work.wait()
        return True

    def _poll_until(self, deadline: float) -> None:
        """Poll with growing pauses until completion; CollectiveTimeout at the deadline (of ``time.monotonic``)."""
        future_completion.about_to_block()
        begin, pause = time.monotonic(), _MIN_POLL_S
        while not self._work.is_completed():
            now = time.monotonic()
            if now >= deadline:
                limit_s = max(deadline - begin, 0.0)
                raise CollectiveTimeout(f"{self._description()} did not end within {limit_s:g} s")
            time.sleep(min(pause, deadline - now))
            pause = min(pause * 2, _MAX_POLL_S)

    def _description(self) -> str:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.outputs[:4])
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
        self.wait()

    block_current_stream = synchronize

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self.outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            outputs = list(self.outputs)

            def outputs_of(completed: torch.futures.Future[Any]) -> list[torch.Tensor]:
                completed.value()  # raises the operation's error
                return outputs

            self._future = self._work.get_future().then(outputs_of)
        return self._future
