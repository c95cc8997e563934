"""A run's own times: when each bucket of gradients was ready, and how long it was under way.

`dtcomm plan --record` replays them over another link. Times are medians over the recorded steps; a step begins when
its first bucket is ready.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple


class BucketRecord(NamedTuple):
    """One bucket: uncompressed bytes, when it was ready and how long it took, in seconds."""

    nbytes: int
    ready: float
    took: float


class StepRecorder:
    """Collects ``steps`` whole steps, then writes ``path`` once; ``ranks`` and ``codec`` are told along."""

    def __init__(
        self, path: str | os.PathLike[str], steps: int, ranks: int, codec: str, writes: bool
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps}: want at least 1")
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir():
            raise ValueError(f"path: there is no folder {self.path.parent}")
        self._wanted, self._ranks, self._codec, self._writes = steps, ranks, codec, writes
        self._steps: list[list[BucketRecord]] = []

    def step(self, sent: Sequence[BucketRecord]) -> bool:
        """A step is over; True when there are enough and the file is written."""
        if sent:
            step = sorted(sent, key=lambda each: each.ready)
            if self._steps and len(self._steps[-1]) != len(step):
                self._steps = []  # DDP makes its buckets anew after the first step
            self._steps.append(step)
        if len(self._steps) <= self._wanted:
            return False
        if self._writes:
            found = summary(self._steps, self._ranks, self._codec)
            self.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return True


def summary(steps: Sequence[Sequence[BucketRecord]], ranks: int, codec: str) -> dict[str, Any]:
    """What `dtcomm plan --record` reads; the last step only tells when the one before ended."""
    usual = statistics.mode(map(len, steps))
    kept = [(step, later[0].ready) for step, later in pairwise(steps) if len(step) == usual]
    if not kept:
        raise ValueError("record: no two steps in a row have the same buckets")
    buckets = [
        {
            "bytes": kept[-1][0][at].nbytes,
            "ready_ms": _ms(step[at].ready - step[0].ready for step, _ in kept),
            "comm_ms": _ms(step[at].took for step, _ in kept),
        }
        for at in range(usual)
    ]
    return {
        "ranks": ranks,
        "codec": codec,
        "steps": len(kept),
        "step_ms": _ms(end - step[0].ready for step, end in kept),
        # From the arrival of the last bucket to the first of the next step.
        "rest_ms": _ms(max(0.0, end - _arrival(step)) for step, end in kept),
        "buckets": buckets,
    }


def _arrival(step: Sequence[BucketRecord]) -> float:
    # They go one after the other.
    free = 0.0
    for each in step:
        free = max(free, each.ready) + each.took
    return free


def _ms(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 4)
