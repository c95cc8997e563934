"""How long steps take on a device: marks between what is queued there, read when it has come past them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dtcomm.ddp.autotune.measure import BucketTiming
from dtcomm.device.streams import Streams


class Marked(NamedTuple):
    """One bucket: marks behind its gradients and behind its mean, and bytes sent."""

    ready: Any
    landed: Any
    sent: int


class _Step(NamedTuple):
    number: int
    begun: Any
    over: Any
    buckets: Sequence[Marked]


class Clock:
    """Of a device's steps."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._steps: deque[_Step] = deque()
        self._begun: Any = None

    def mark(self) -> Any:
        """Behind what the current stream was given so far."""
        return self._streams.mark()

    def begin(self) -> None:
        """The first bucket of a step is there."""
        self._begun = self.mark()

    def end(self, number: int, buckets: Sequence[Marked]) -> None:
        """The current stream has been told to wait for the last one."""
        self._steps.append(_Step(number, self._begun, self.mark(), buckets))

    def tell(self, end: Callable[[int, float, Sequence[BucketTiming]], None], *, wait: bool) -> None:
        """``end`` of the steps that the device is through with; of all of them where the host is to ``wait``."""
        streams = self._streams
        while self._steps:
            step = self._steps[0]
            if not streams.query(step.over):
                if not wait:
                    return
                streams.synchronize(step.over)
            self._steps.popleft()
            buckets = [
                BucketTiming(streams.elapsed(step.begun, ready), streams.elapsed(ready, landed), sent)
                for ready, landed, sent in step.buckets
            ]
            end(step.number, streams.elapsed(step.begun, step.over), buckets)
