"""Messages between two ranks of a group: a pair of communicators that the two make when they first talk.

The other ranks take no part. Each direction has a communicator of its own, so what a rank sends does not wait for
what it receives. Making them takes both ranks, and a rank that only starts a message must not wait for that: its
messages are kept, and a thread starts them in their order once the peer has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.errors import DtcommError
from dtcomm.runtime.bootstrap.cpu import PROTOCOL
from dtcomm.runtime.communicator import Communicator, entry_of
from dtcomm.runtime.process_groups import group_store, position, require_group
from dtcomm.runtime.work import Work

Start = Callable[[Communicator], Work | None]


class Pair:
    """This rank and one peer. ``make`` meets the peer and returns the communicators (to it, from it)."""

    def __init__(self, make: Callable[[], tuple[Communicator, Communicator]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._begun = False
        self._over = threading.Event()  # the meeting is: there are communicators or an error
        self._waiting: list[_Later] = []
        self._made: tuple[Communicator, Communicator] | None = None
        self._error: BaseException | None = None
        self._closed = False

    def communicator(self, sends: bool) -> Communicator:
        """The one to send through or to receive from, when the peer has come; raises what the meeting failed
        with.
        """
        if self._made is None:
            with self._lock:
                first, self._begun = not self._begun, True
            if first:
                self._meet()
            self._over.wait()
        if self._made is None:
            assert self._error is not None
            raise type(self._error)(*self._error.args)
        return self._made[0 if sends else 1]

    def later(self, sends: bool, start: Start, outputs: Sequence[torch.Tensor]) -> Work:
        """Start a message at once where the pair is made, when it is made otherwise."""
        with self._lock:
            if not self._over.is_set():
                work = _Later(sends, start, outputs)
                self._waiting.append(work)
                first, self._begun = not self._begun, True
                if first:
                    threading.Thread(target=self._meet, name="dtcomm-meeting", daemon=True).start()
                return work
        started = start(self.communicator(sends))
        assert started is not None
        return started

    def _meet(self) -> None:
        try:
            made = self._make()
        except BaseException as error:
            self._error = error
        else:
            self._made = made
        with self._lock:
            if self._closed:
                self._let_go()
            waiting, self._waiting = self._waiting, []
            for work in waiting:
                work.begin(self._made, self._error)
            self._over.set()
        for work in waiting:  # whoever is told may send again
            work.announce()

    def close(self) -> None:
        """Release both communicators."""
        with self._lock:
            self._closed = True
            self._let_go()

    def _let_go(self) -> None:
        for communicator in self._made or ():
            communicator.close()
        if self._error is None:
            self._error = DtcommError("group: its communicators have been released")
        self._made = None


class _Later(Work):
    """A message of a pair that is not made yet."""

    def __init__(self, sends: bool, start: Start, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._sends = sends
        self._start = start
        self._begun = threading.Event()
        self._work: Work | None = None
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def begin(self, made: tuple[Communicator, Communicator] | None, error: BaseException | None) -> None:
        """Start, or fail as the meeting did."""
        try:
            if made is None:
                assert error is not None
                raise error
            self._work = self._start(made[0 if self._sends else 1])
            assert self._work is not None
        except BaseException as failure:
            self._error = failure
        self._begun.set()

    def announce(self) -> None:
        """Let the future follow the message, once it has begun."""
        if self._work is None:
            self._future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            self._work.get_future().add_done_callback(self._finish)

    def _finish(self, done: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            self._future.set_result(done.value())
        except BaseException as failure:
            self._future.set_exception(failure)  # type: ignore[arg-type]

    def _started(self) -> Work:
        self._begun.wait()
        if self._work is None:
            assert self._error is not None
            raise self._error
        return self._work

    def wait(self) -> None:
        self._started().wait()

    def is_completed(self) -> bool:
        return self._begun.is_set() and (self._work is None or self._work.is_completed())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        return self._started().wire_bytes

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._started().seconds


def pair_of(
    group: dist.ProcessGroup | None,
    peer: int,
    argument: str,
    purpose: str = "",
    device: torch.device | None = None,
) -> Pair:
    """The pair with a global rank of the group; ValueError where there can be none.

    Messages of another ``purpose``, and of tensors on another ``device`` (None: the CPU), have a pair of their own.
    """
    purpose += "" if device is None else f"{device.type}/"
    target = require_group(group)
    entry = entry_of(target)
    found: Any = entry.pairs.get((peer, purpose))
    if found is not None:
        pair: Pair = found
        return pair
    ranks = dist.get_process_group_ranks(target)
    mine, other = dist.get_rank(target), position(ranks, peer, argument)
    if mine == other:
        raise ValueError(f"{argument}: rank {peer} is this rank itself")
    pair = Pair(lambda: _make(target, mine, other, purpose, device))
    kept: Pair = entry.pairs.setdefault((peer, purpose), pair)
    return kept


def _make(
    group: dist.ProcessGroup, mine: int, other: int, purpose: str, device: torch.device | None
) -> tuple[Communicator, Communicator]:
    low, high = sorted((mine, other))
    store = group_store(group)
    if hasattr(store, "clone"):  # a connection of our own: a wait on the common one would hold up everybody
        store = store.clone()
    name = f"{purpose}{low}-{high}"
    epoch = store.add(f"dtcomm/{PROTOCOL}/made/{name}/{mine}", 1)
    made = [
        Communicator(group, f"{epoch}/{name}/{way}", members=(low, high), store=store, device=device)
        for way in ("up", "down")
    ]
    return (made[0], made[1]) if mine == low else (made[1], made[0])
