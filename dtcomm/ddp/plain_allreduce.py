"""A bucket's mean by the group's own backend, as DDP takes it where there is no hook."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.collectives import Work


class PlainAllReduceWork(Work):
    """The all-reduce of a buffer, which is multiplied by 1 / ranks before as DDP does it, for the same bits."""

    def __init__(self, buffer: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        super().__init__([buffer])
        ranks = dist.get_world_size(group)
        buffer.mul_(1.0 / ranks)
        self.wire_bytes = 2 * (ranks - 1) * buffer.numel() * buffer.element_size() // ranks
        self.started_ns = time.monotonic_ns()
        self._work: Any = dist.all_reduce(buffer, group=group, async_op=True)
        self._future: torch.futures.Future[list[torch.Tensor]] = self._work.get_future().then(self._end)

    def wait(self) -> None:
        self._future.wait()

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return (self.finished_ns - self.started_ns) * 1e-9

    def _end(self, done: torch.futures.Future[Any]) -> list[torch.Tensor]:
        done.value()  # raises what it failed with
        self.finished_ns = time.monotonic_ns()
        return self._outputs
