"""Keeps the last steps of a run: the integrations tell it what happens, it looks at the clock.

Off, it costs a look at one attribute a bucket; `python -m bench.insight` measures what it costs while it is on.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtcomm.profiling import trace
from dtcomm.profiling.metrics import Metric, of_summary
from dtcomm.profiling.step_record import Message, Step
from dtcomm.profiling.summary import Summary, summarise
from dtcomm.runtime import phase_timer

now = time.monotonic_ns


class Timeline:
    """``what`` names the run's kind ("ddp", "fsdp"). It starts switched off.

    A step begins with the first forward, or the first message, after the one before it has closed.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.on = False
        self._kept: deque[Step] = deque(maxlen=1)
        self._open: Step | None = None
        self._number = 0
        self._forward_began = self._backward_began = 0
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._handles: list[Any] = []
        self._release: Callable[[], object] = lambda: None

    def start(self, steps: int = 200) -> None:
        """Keep the times of the last ``steps`` steps from now on."""
        if steps < 1:
            raise ValueError(f"steps={steps}: want at least 1")
        self._kept = deque(self._kept, maxlen=steps)
        if not self.on:
            self.on = True
            phase_timer.add_users(1)
            self._release = weakref.finalize(self, phase_timer.add_users, -1)
            self._attach()

    def stop(self) -> None:
        """Keep what there is, and look at no clock any more."""
        self.on = False
        self._release()
        for handle in self._handles:
            handle.remove()
        self._handles, self._open = [], None

    def watch(self, module: torch.nn.Module) -> None:
        """Tell forward and backward by this module; without one a step begins with its first message."""
        self._module = weakref.ref(module)
        if self.on:
            self._attach()

    @property
    def steps(self) -> tuple[Step, ...]:
        """Those that are over, oldest first; the last one's end comes with the next one's beginning."""
        return tuple(self._kept)

    def summary(self) -> Summary:
        """Medians over the kept steps; ValueError where there are too few."""
        return summarise(self.steps)

    def metrics(self) -> list[Metric]:
        """Of the summary; none where there is too little."""
        return of_summary(self.summary()) if any(step.length and step.messages for step in self._kept) else []

    def trace(self, path: str | os.PathLike[str], rank: int) -> str:
        """Write the kept steps as a Chrome trace: ``trace.json`` becomes ``trace.rank0.json``, whose path is returned.

        ValueError where nothing was kept.
        """
        if not self._kept:
            raise ValueError(
                "trace: no step was kept; call timeline.start() before the steps, or give timeline=100"
            )
        return trace.write(path, self.what, rank, socket.gethostname(), self.steps)

    # What the integrations tell.

    def begin(self) -> Step:
        """The step under way."""
        if self._open is None:
            moment = now()
            if self._kept and not self._kept[-1].end:
                self._kept[-1].end = moment
            self._open = Step(self._number, moment)
            self._number += 1
        return self._open

    def backward_begins(self) -> None:
        """Of one micro-batch; more than once is once."""
        self.begin()
        self._backward_began = self._backward_began or now()

    def backward_ends(self) -> None:
        """All gradients are computed."""
        if self._open is not None and self._backward_began:
            self._open.backward.append((self._backward_began, now()))
        self._backward_began = 0

    def close(self, messages: Sequence[Message] = (), *, at_end: bool = False) -> None:
        """The step's messages are done. ``at_end``: the caller waited for all of them after its backward."""
        step, self._open = self.begin(), None
        step.messages += messages
        if at_end and step.backward:
            step.assign_waits(step.backward[-1][1])
        self._kept.append(step)

    def _attach(self) -> None:
        module = None if self._module is None else self._module()
        if module is None or self._handles:
            return
        self._handles = [
            module.register_forward_pre_hook(self._forward_begins, prepend=True),
            module.register_forward_hook(self._forward_ends),
        ]

    def _forward_begins(self, module: torch.nn.Module, given: Any) -> None:
        if self.what == "fsdp" and self._open is not None and self._open.messages:
            self.close()  # nothing else says that a step is over
        self.begin()
        self._forward_began = now()

    def _forward_ends(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        self.begin().forward.append((self._forward_began, now()))
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_arrives)  # type: ignore[no-untyped-call]
                return

    def _gradient_arrives(self, gradient: torch.Tensor) -> None:
        if not self.on:
            return
        self.backward_begins()
        torch.autograd.Variable._execution_engine.queue_callback(self.backward_ends)


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in _tensors(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in _tensors(value)]
    return []
