"""Records when the buckets of gradients were ready and how long each took, for ``dtcomm plan --record``.

The planner replays the times over another link. They are medians over the recorded steps; a step begins when its first
bucket is ready.
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
    """One bucket: its uncompressed bytes, when it was ready and how long its collective took, in seconds."""

    nbytes: int
    ready: float
    seconds: float


class StepRecorder:
    """Collects whole steps, then writes a file once.

    Args:
        path: The file.
        steps: The number of steps.
        ranks: The number of ranks, for the file.
        codec: What gradients are compressed with, for the file.
        writes: Whether this rank writes the file.

    Raises:
        ValueError: There is no such folder, or ``steps`` is below 1.
    """

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

    def add_step(self, buckets: Sequence[BucketRecord]) -> bool:
        """Add a step; return True once there are enough and the file is written."""
        if buckets:
            step = sorted(buckets, key=lambda bucket: bucket.ready)
            if self._steps and len(self._steps[-1]) != len(step):
                self._steps = []  # DDP rebuilds its buckets after the first step
            self._steps.append(step)
        if len(self._steps) <= self._wanted:
            return False
        if self._writes:
            content = summarize_steps(self._steps, self._ranks, self._codec)
            self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return True


def summarize_steps(steps: Sequence[Sequence[BucketRecord]], ranks: int, codec: str) -> dict[str, Any]:
    """Return what ``dtcomm plan --record`` reads; the last step only says when the one before it ended."""
    count = statistics.mode(map(len, steps))
    pairs = [(step, following[0].ready) for step, following in pairwise(steps) if len(step) == count]
    if not pairs:
        raise ValueError("record: no two steps in a row have the same buckets")
    buckets = [
        {
            "bytes": pairs[-1][0][index].nbytes,
            "ready_ms": _median_ms(step[index].ready - step[0].ready for step, _ in pairs),
            "comm_ms": _median_ms(step[index].seconds for step, _ in pairs),
        }
        for index in range(count)
    ]
    return {
        "ranks": ranks,
        "codec": codec,
        "steps": len(pairs),
        "step_ms": _median_ms(end - step[0].ready for step, end in pairs),
        # From the end of the last bucket to the first bucket of the next step.
        "rest_ms": _median_ms(max(0.0, end - _last_end(step)) for step, end in pairs),
        "buckets": buckets,
    }


def _last_end(step: Sequence[BucketRecord]) -> float:
    # The collectives run one after the other.
    free = 0.0
    for bucket in step:
        free = max(free, bucket.ready) + bucket.seconds
    return free


def _median_ms(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 4)
