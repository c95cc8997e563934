"""A progress bar for programs that run for hours; where stderr is no terminal, a printed line for each job."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Shows the running job and its steps, on a terminal with rich; elsewhere nothing is drawn.

    Example::

        with Progress() as progress:
            progress.begin("text | int8 | seed 0")
            progress.step(10, 1000)
            progress.end("held-out loss 1.93")
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._name, self._began, self._drawn = "", 0.0, 0.0
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as Bars
            except ImportError:
                return
            self._bar = Bars(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                auto_refresh=False,  # a drawing thread would use the core that trains
            )

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, name: str) -> None:
        """A job begins."""
        self._name, self._began = name, time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=None)

    def step(self, done: int, total: int) -> None:
        """Steps of the job are done; it is drawn twice a second at most."""
        now = time.monotonic()
        if self._bar is not None and now - self._drawn > 0.5:
            self._drawn = now
            self._bar.update(self._task, completed=done, total=total, refresh=True)

    def end(self, result: str) -> None:
        """The job is done; print its result."""
        line = f"{self._name}: {result} in {time.monotonic() - self._began:.0f} s"
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.remove_task(self._task)
            self._bar.console.print(line, highlight=False)
