"""What a backward pass needs where gradients are on a device: streams, marks, and landing that nobody waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtcomm.collectives import Work
from dtcomm.compress.error_state import ErrorState
from dtcomm.compress.stage_scheduler import Stages, StageScheduler
from dtcomm.ddp.autotune.clock import Clock, Marked
from dtcomm.ddp.chooser import Chooser
from dtcomm.ddp.in_flight_bucket import InFlightBucket
from dtcomm.device.streams import record_streams, streams_of


class There:
    """Of one device; ``clock`` where somebody asks how long steps take."""

    def __init__(self, device: torch.device, chooser: Chooser) -> None:
        self.streams = streams_of(device)
        self.clock = Clock(self.streams) if chooser.timed else None
        self._sequencer = StageScheduler(self.streams)
        chooser.on(device)

    def restart(self) -> None:
        """A backward pass begins."""
        self._sequencer.restart()

    def submit(
        self, stages: Stages, buffer: torch.Tensor, used: Sequence[torch.Tensor | None], *, last: bool
    ) -> Work:
        """The stages of a bucket, which read and write ``used``."""
        return self._sequencer.submit(stages, [buffer], used, last=last)

    def tell(self, chooser: Chooser, step: int) -> None:
        """What steps have taken by now, before a choice is made."""
        if self.clock is not None:
            self.clock.tell(chooser.end, wait=chooser.decides(step))

    def begin(self) -> None:
        """The first bucket of a step is there, and what it gets is known."""
        if self.clock is not None:
            self.clock.begin()

    def ready(self) -> Any:
        """A mark behind a bucket's gradients."""
        return None if self.clock is None else self.clock.mark()

    def end(self, step: int, flights: Sequence[InFlightBucket]) -> None:
        """The current stream has been told to wait for all of them."""
        if self.clock is not None:
            marked = [Marked(each.ready_there, each.landed_there, each.work.wire_bytes) for each in flights]
            self.clock.end(step, marked)

    def land(
        self, flight: InFlightBucket, memory: ErrorState, failed: Callable[[Exception], bool]
    ) -> torch.futures.Future[Any]:
        """The future of a bucket's landing, on a stream beside the caller's: a callback's own would hold no memory.

        ``failed`` is told an error, and says whether the future is to carry it.
        """
        landed: torch.futures.Future[Any] = self.streams.future()
        held = [(self, flight, memory, failed)]  # emptied, as `Reducer` does

        def land(future: torch.futures.Future[Any]) -> None:
            there, flight, memory, failed = held.pop()
            streams, buffer = there.streams, flight.buffer
            carried: Exception | None = None
            try:
                future.value()
                with streams.on(streams.side_stream()):
                    flight.work.wait()
                    record_streams(buffer)
                    flight.land(memory)
                    flight.done_ns = time.monotonic_ns()
                    flight.landed_there = there.ready()
            except Exception as error:
                carried = error if failed(error) else None
            del there, flight, memory, failed
            if carried is not None:
                landed.set_exception(carried)
                return
            with streams.on(streams.side_stream()):
                landed.set_result(buffer)

        flight.work.get_future().add_done_callback(land)
        return landed
