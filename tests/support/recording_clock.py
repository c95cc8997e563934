"""A fake GPU for `dtcomm perf`: CPU tensors and a clock that records its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtcomm.cli.perf.placement import CpuPlacement

SHARED = "ranks 0 and 1 share a GPU"


class RecordingClock:
    """A clock that records its calls in order. A "run" event takes one second, all others none.

    A mark can only be read after the host has synchronized, as with a CUDA event.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self._synchronized = 0

    def append(self, event: str) -> None:
        self.events.append(event)

    def record(self) -> int:
        self.append("record")
        return len(self.events)

    def synchronize(self) -> None:
        self.append("synchronize")
        self._synchronized = len(self.events)

    def seconds(self, begin: int, end: int) -> float:
        assert begin < end <= self._synchronized, "a mark was read before the host had waited for it"
        return float(sum(event == "run" for event in self.events[begin:end]))

    def graph(self, run: Callable[[], object], calls: int) -> Callable[[], object]:
        self.append(f"graph of {calls}")

        def replay() -> None:
            for _ in range(calls):
                run()

        return replay


class FakeGpu(CpuPlacement):
    """``GpuPlacement`` of ``dtcomm perf`` for a GPU that two ranks share, on the CPU."""

    kind = "cuda"
    shared_gpu = SHARED

    def __init__(self) -> None:
        self.clocks: list[RecordingClock] = []

    def pin(self, requested: bool | None) -> str:
        return "cuda:0 no GPU"

    def clock(self, cpu: bool) -> RecordingClock:
        self.clocks.append(RecordingClock())
        return self.clocks[-1]

    def free_bytes(self) -> int:
        return 1 << 24

    def describe_gpu(self) -> dict[str, Any]:
        return {"host": "here", "uuid": "1", "name": "no GPU", "device": str(torch.device("cuda", 0))}
