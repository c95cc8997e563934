"""A GPU that is not there: CPU tensors, and a clock whose marks are told by how far the run has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtcomm.cli.perf.placement import OnHost

SHARED = "ranks 0 and 1 share a GPU"


class Counted:
    """A clock that keeps what was asked of it, in order; a call of what is measured takes a second, a mark none.

    A mark can be read once the host has waited for it, as an event of a device can.
    """

    def __init__(self) -> None:
        self.story: list[str] = []
        self._settled = 0

    def did(self, what: str) -> None:
        self.story.append(what)

    def record(self) -> int:
        self.did("mark")
        return len(self.story)

    def synchronize(self) -> None:
        self.did("settle")
        self._settled = len(self.story)

    def seconds(self, begin: int, end: int) -> float:
        assert begin < end <= self._settled, "a mark was read before the host had waited for it"
        return float(sum(what == "run" for what in self.story[begin:end]))

    def graph(self, run: Callable[[], object], calls: int) -> Callable[[], object]:
        self.did(f"graph of {calls}")

        def replay() -> None:
            for _ in range(calls):
                run()

        return replay


class FakeGpu(OnHost):
    """What ``perf_place.OnGpu`` is, on the CPU, shared by two ranks."""

    kind = "cuda"
    shared = SHARED

    def __init__(self) -> None:
        self.clocks: list[Counted] = []

    def pin(self, wanted: bool | None) -> str:
        return "cuda:0 no GPU"

    def clock(self, cpu: bool) -> Counted:
        self.clocks.append(Counted())
        return self.clocks[-1]

    def free(self) -> int:
        return 1 << 24

    def facts(self) -> dict[str, Any]:
        return {"host": "here", "uuid": "1", "name": "no GPU", "device": str(torch.device("cuda", 0))}
