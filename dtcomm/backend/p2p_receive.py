"""The handle of one recv, whose message somebody else takes in."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dtcomm.backend.tensor_views import is_own, put
from dtcomm.backend.work import until


class Attended(Protocol):
    """Who takes messages in, as far as those that wait for one see him."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while a receive ends."""

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group."""

    def attend(self, receive: Receive) -> None:
        """The caller waits: let him take in what comes."""


class Receive(dist.Work):
    """One recv: done when a message has come that fits. ``source`` is the sender's rank in the group."""

    def __init__(
        self, mail: Attended, tensor: torch.Tensor, run: torch.Tensor, source: int | None, tag: int
    ) -> None:
        super().__init__()
        self.mail = mail
        self.tensor = tensor
        self.bytes = run.view(torch.uint8) if run.numel() else run.new_empty(0, dtype=torch.uint8)
        self._run = run
        self.wanted = source
        self.source = -1 if source is None else source
        self.tag = tag
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """The message is here, or will not come; the mail's lock is held."""
        if error is None and not is_own(self._run, self.tensor):
            put([self.tensor], self._run)
        self._error = error
        self._over.set()
        if self._future is not None:
            self._settle(self._future)

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result([self.tensor])

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            until(self._over.is_set, time.monotonic() + timeout.total_seconds(), self._what())
        elif not self._over.is_set():
            self.mail.attend(self)
            self._over.wait()
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        return True

    def _what(self) -> str:
        source = "any rank" if self.wanted is None else f"rank {self.mail.ranks[self.wanted]}"
        return f"recv of {self.bytes.numel()} bytes from {source}, tag {self.tag},"

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self.tensor]

    def get_future(self) -> torch.futures.Future[Any]:
        with self.mail.lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._over.is_set():
                    self._settle(self._future)
            return self._future
