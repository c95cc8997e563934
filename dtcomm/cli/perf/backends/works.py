"""Operations under way that consist of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def wait(work: Any) -> None:
    """Until it is done, where there is anything to wait for."""
    if work is not None:
        work.wait()


def ring(
    send: Callable[[int], Any],
    receive: Callable[[int], Any],
    output: torch.Tensor,
    input: torch.Tensor,
    asynchronous: bool,
) -> Callable[[], Any]:
    """Every rank sends to the next one, and receives from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def run() -> Any:
        if ranks == 1:
            output.copy_(input)
            return Both([]) if asynchronous else None
        both = Both([send((rank + 1) % ranks), receive((rank - 1) % ranks)])
        if asynchronous:
            return both
        both.wait()
        return None

    return run


class Both:
    """What was sent and what is received, as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    @property
    def wire_bytes(self) -> int | None:
        counted: list[Any] = [getattr(work, "wire_bytes", None) for work in self._works]
        return None if None in counted else sum(counted)


class Then:
    """A work and what is to be done when it has ended."""

    def __init__(self, work: Any, then: Callable[[], Any]) -> None:
        self._work = work
        self._then = then

    def wait(self) -> None:
        self._work.wait()
        self._then()
