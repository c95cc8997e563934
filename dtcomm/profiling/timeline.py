"""`Timeline` records when the last N training steps computed, sent and waited.

The DDP hook and FSDP call it. Switched off it costs one attribute look-up for each bucket. `profiler_range` and
`AsyncRange` show the same work in traces of torch.profiler.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from dtcomm import torch_compat
from dtcomm.profiling import trace
from dtcomm.profiling.metrics import Metric, summary_metrics
from dtcomm.profiling.summary import Summary, summarize
from dtcomm.profiling.trace import MessageRecord, StepRecord
from dtcomm.work.statistics import add_timelines

T = TypeVar("T")
now = time.monotonic_ns


class Timeline:
    """Records the last steps of a run. It is off until `start`.

    A step begins with the first forward pass, or with the first message, after the step before it was closed.

    Args:
        kind: What is recorded, "ddp" or "fsdp".

    Attributes:
        kind: What is recorded.
        on: Whether it records.

    Example::

        state = dtcomm.ddp.compress(model, "int8", timeline=100)
        ...  # train
        print(state.timeline.summary())
        state.timeline.stop()
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.on = False
        self._steps: deque[StepRecord] = deque(maxlen=1)
        self._current: StepRecord | None = None
        self._number = 0
        self._forward_begin = self._backward_begin = 0
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._handles: list[Any] = []
        self._stop_phase_times: Callable[[], object] = lambda: None

    def start(self, steps: int = 200) -> None:
        """Record from now on, and keep the last ``steps`` steps; ValueError if that is below 1."""
        if steps < 1:
            raise ValueError(f"steps: expected at least 1, got {steps}")
        self._steps = deque(self._steps, maxlen=steps)
        if not self.on:
            self.on = True
            add_timelines(1)
            self._stop_phase_times = weakref.finalize(self, add_timelines, -1)
            self._register_hooks()

    def stop(self) -> None:
        """Stop recording; the recorded steps stay."""
        self.on = False
        self._stop_phase_times()
        for handle in self._handles:
            handle.remove()
        self._handles, self._current = [], None

    def attach(self, module: torch.nn.Module) -> None:
        """Record the forward and backward passes of a module; without one a step begins with its first message."""
        self._module = weakref.ref(module)
        if self.on:
            self._register_hooks()

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The recorded steps, oldest first; the end of the last one is set when the next one begins."""
        return tuple(self._steps)

    def summary(self) -> Summary:
        """Return medians over the recorded steps; ValueError if there are too few."""
        if not self.on and not self._steps:
            raise ValueError(
                "summary: the timeline is off; pass timeline=100 when you compress, or call state.timeline.start(100)"
            )
        return summarize(self.steps)

    @property
    def has_summary(self) -> bool:
        """Whether there are steps to summarize."""
        return any(step.length and step.messages for step in self._steps)

    def metrics(self) -> list[Metric]:
        """Return the metrics of the summary; none if there are too few steps."""
        return summary_metrics(self.summary()) if self.has_summary else []

    def trace(self, path: str | os.PathLike[str], rank: int) -> str:
        """Write the recorded steps as a Chrome trace.

        Args:
            path: ``trace.json`` becomes ``trace.rank0.json``.
            rank: This rank.

        Returns:
            The path of the file.

        Raises:
            ValueError: No step was recorded.
        """
        if not self._steps:
            raise ValueError(
                "trace: no step was recorded; call timeline.start() before the steps, or pass timeline=100"
            )
        return trace.write(path, self.kind, rank, socket.gethostname(), self.steps)

    # The integrations call the methods below.

    def current_step(self) -> StepRecord:
        """Return the step in progress; begins one if there is none."""
        if self._current is None:
            moment = now()
            if self._steps and not self._steps[-1].end:
                self._steps[-1].end = moment
            self._current = StepRecord(self._number, moment)
            self._number += 1
        return self._current

    def begin_backward(self) -> None:
        """The backward pass of a micro-batch begins; further calls in the same pass have no effect."""
        self.current_step()
        self._backward_begin = self._backward_begin or now()

    def end_backward(self) -> None:
        """All gradients of the micro-batch are computed."""
        if self._current is not None and self._backward_begin:
            self._current.backward.append((self._backward_begin, now()))
        self._backward_begin = 0

    def close_step(self, messages: Sequence[MessageRecord] = (), *, at_end: bool = False) -> None:
        """All messages of the step are done.

        Args:
            messages: Messages to add to the step.
            at_end: The caller waited for all messages after its backward pass.
        """
        step, self._current = self.current_step(), None
        step.messages += messages
        if at_end and step.backward:
            step.assign_waits(step.backward[-1][1])
        self._steps.append(step)

    def _register_hooks(self) -> None:
        module = None if self._module is None else self._module()
        if module is None or self._handles:
            return
        self._handles = [
            module.register_forward_pre_hook(torch_compat.ModuleHook(self._begin_forward), prepend=True),
            module.register_forward_hook(torch_compat.ModuleHook(self._end_forward)),
        ]

    def _begin_forward(self, module: torch.nn.Module, args: Any) -> None:
        if self.kind == "fsdp" and self._current is not None and self._current.messages:
            self.close_step()  # FSDP has no other sign that a step is over
        self.current_step()
        self._forward_begin = now()

    def _end_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self.current_step().forward.append((self._forward_begin, now()))
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(self._first_gradient)  # type: ignore[no-untyped-call]
                return

    def _first_gradient(self, gradient: torch.Tensor) -> None:
        if not self.on:
            return
        self.begin_backward()
        torch_compat.after_backward(self.end_backward)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output, in which there may be dicts, lists and tuples."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in tensors_of(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in tensors_of(value)]
    return []


# --- ranges in the traces of torch.profiler; without a running profiler they cost next to nothing ---------------------


def profiler_is_active() -> bool:
    """Return whether torch.profiler or torch.autograd.profiler runs on this thread."""
    return torch_compat.profiler_is_active()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a context manager that shows its block as the range ``dtcomm::name``."""
    return torch.profiler.record_function(f"dtcomm::{name}") if profiler_is_active() else nullcontext()


class AsyncRange:
    """A range that begins here and ends with a future, on whatever thread completes it."""

    def __init__(self, name: str) -> None:
        self._range = torch.profiler.record_function(f"dtcomm::{name}") if profiler_is_active() else None
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def until(self, future: torch.futures.Future[T]) -> torch.futures.Future[T]:
        """End the range with ``future``; returns a future to use in its place."""
        if self._range is None:
            return future
        chained: torch.futures.Future[T] = torch_compat.end_with_future(self._range, future)
        self._range.__exit__(None, None, None)
        return chained

    def end(self) -> None:
        """End the range now, if there is no future."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
