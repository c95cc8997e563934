"""The connection of a communicator: order of deferred operations, errors, cancellation, several threads."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from dtcomm.errors import CollectiveTimeout, CommunicatorClosed, DtcommError, PeerLost
from dtcomm.runtime.bootstrap import Connection
from dtcomm.runtime.process_groups import Deadline
from dtcomm.streams import HostStreams
from dtcomm.work import CompositeWork, Work, completion

RELEASED = "group: its communicators have been released"


class Ranks:
    """Other ranks, which come when the test says so; records what the connection does."""

    def __init__(self, timeout_s: float = 60.0, error: BaseException | None = None) -> None:
        self.come = threading.Event()
        self.waited_for = threading.Event()
        self.error = error
        self.calls: list[str] = []
        self.started: list[int] = []
        self.connection = Connection(
            lambda: timedelta(seconds=timeout_s),
            HostStreams(),
            self._connect,
            lambda: self.calls.append("connected"),
            lambda: self.calls.append("close"),
        )

    def _connect(self, deadline: Deadline) -> None:
        self.calls.append("connect")
        self.waited_for.set()
        while not self.come.wait(0.005):
            if not deadline.left_s():
                raise CollectiveTimeout("rank 1 did not come")
        if self.error is not None:
            raise self.error

    def start(self, number: int) -> Work:
        """Issue operation ``number``."""
        return self.connection.start([torch.ones(1)], lambda: self._begin(number))

    def _begin(self, number: int) -> Work:
        self.started.append(number)
        return CompositeWork((), [torch.ones(1)])


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_operations_start_in_the_order_of_issue() -> None:
    ranks = Ranks()
    later: list[Work] = []

    def begin_first() -> Work:
        later.append(ranks.start(3))  # issued while deferred operations are being started
        return ranks._begin(0)

    works = [ranks.connection.start([], begin_first), ranks.start(1), ranks.start(2)]
    assert ranks.started == [] and not any(work.is_completed() for work in works)
    ranks.come.set()
    ranks.connection.wait()
    ranks.start(4)
    for work in (*works, *later):
        work.wait()
    assert ranks.started == [0, 1, 2, 3, 4]
    assert ranks.calls == ["connect", "connected"]
    completion.wait_for_threads(10.0)


def test_threads_share_one_connection() -> None:
    ranks = Ranks()
    waiting = [in_thread(ranks.connection.wait) for _ in range(4)]
    assert ranks.waited_for.wait(10)
    work = ranks.start(0)
    ranks.come.set()
    for thread in waiting:
        thread.join(10)
    work.wait()
    assert not any(thread.is_alive() for thread in waiting)
    assert ranks.calls == ["connect", "connected"] and ranks.started == [0]


def test_every_call_raises_an_error_of_its_own() -> None:
    ranks = Ranks(error=PeerLost("rank 1 is gone"))
    works = [ranks.start(number) for number in range(3)]
    future = works[0].get_future()
    ranks.come.set()
    errors = []
    for call in (*(work.wait for work in works), ranks.connection.wait, partial(ranks.start, 3)):
        with pytest.raises(PeerLost, match="rank 1 is gone") as error:
            call()
        errors.append(error.value)
    assert len({id(error) for error in errors}) == 5
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        future.wait()
    assert ranks.started == [] and ranks.calls == ["connect"]


def test_an_interrupted_thread_does_not_interrupt_others() -> None:
    ranks = Ranks(error=KeyboardInterrupt())
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            ranks.connection.wait()
        except BaseException as error:
            caught.append(error)

    first = in_thread(wait)
    assert ranks.waited_for.wait(10)
    work = ranks.start(0)
    ranks.come.set()
    with pytest.raises(DtcommError, match="KeyboardInterrupt"):
        work.wait()
    first.join(10)
    assert [type(error) for error in caught] == [KeyboardInterrupt]


def test_cancel_before_anything_was_issued() -> None:
    ranks = Ranks()
    assert ranks.connection.cancel()
    for call in (ranks.connection.wait, partial(ranks.start, 0)):
        with pytest.raises(CommunicatorClosed, match=RELEASED):
            call()
    assert ranks.calls == []


@pytest.mark.parametrize("ranks_come", [False, True])
def test_cancel_while_ranks_are_waited_for(ranks_come: bool) -> None:
    ranks = Ranks()
    work = ranks.start(0)
    assert ranks.waited_for.wait(10)
    assert ranks.connection.cancel()
    if ranks_come:
        ranks.come.set()
    with pytest.raises(CommunicatorClosed, match=RELEASED):
        work.wait()
    completion.wait_for_threads(10.0)
    # What was made after all is closed.
    assert ranks.calls in ([["connect", "close"], ["connect"]] if ranks_come else [["connect"]])
    assert ranks.started == []


def test_cancel_after_the_ranks_are_connected_leaves_closing_to_the_caller() -> None:
    ranks = Ranks()
    ranks.come.set()
    ranks.connection.wait()
    assert not ranks.connection.cancel()
    assert ranks.calls == ["connect", "connected"]


def test_a_second_thread_has_a_deadline_of_its_own() -> None:
    ranks = Ranks(timeout_s=0.2)
    blocked = threading.Event()

    def connect(deadline: Deadline) -> None:
        blocked.wait(60)  # does not look at its deadline

    connection = Connection(
        lambda: timedelta(seconds=0.2), HostStreams(), connect, lambda: None, lambda: None
    )
    in_thread(connection.wait)
    work = connection.start([], lambda: ranks._begin(0))
    with pytest.raises(CollectiveTimeout, match="another thread"):
        connection.wait()
    assert not work.is_completed()
    blocked.set()
    work.wait()


class TwoStreams(HostStreams):
    """Streams of which each thread has a current one."""

    def __init__(self) -> None:
        super().__init__()
        self.local = threading.local()

    def current(self) -> Any:
        return getattr(self.local, "stream", "default")

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.local.stream = self.current(), stream
        yield
        self.local.stream = before


def test_deferred_operations_keep_the_stream_and_modes_of_their_caller() -> None:
    ranks, streams = Ranks(), TwoStreams()
    seen: list[tuple[str, bool, bool]] = []

    def begin() -> Work:
        state = (streams.current(), torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        seen.append(state)
        return CompositeWork((), [])

    connection = Connection(
        lambda: timedelta(seconds=60), streams, ranks._connect, lambda: None, lambda: None
    )
    with streams.on("side"):
        works = [connection.start([], begin)]
    with torch.inference_mode():
        works.append(connection.start([], begin))
    ranks.come.set()
    for work in works:
        work.wait()
    assert seen == [("side", False, False), ("default", True, False)]


@pytest.mark.parametrize("seed", range(30))
def test_random_threads_start_everything_in_order(seed: int) -> None:
    generator = random.Random(seed)
    fails, cancels = generator.random() < 0.3, generator.random() < 0.3
    ranks = Ranks(error=PeerLost("rank 1 is gone") if fails else None)
    lock = threading.Lock()
    issued: list[int] = []
    works: list[Work] = []
    refused: list[int] = []

    def issue(count: int) -> None:
        for _ in range(count):
            with lock:  # the numbers are those of the order of issue
                number = len(issued)
                issued.append(number)
                try:
                    works.append(ranks.start(number))
                except DtcommError:
                    refused.append(number)

    def wait() -> None:
        try:
            ranks.connection.wait()
        except DtcommError:
            assert fails or cancels

    actions: list[Callable[[], object]] = [
        *(partial(issue, generator.randrange(1, 8)) for _ in range(4)),
        *(wait for _ in range(generator.randrange(3))),
        ranks.come.set,
        *([ranks.connection.cancel] if cancels else []),
    ]
    generator.shuffle(actions)
    threads = [in_thread(action) for action in actions]
    for thread in threads:
        thread.join(20)
    failed = 0
    for work in works:
        try:
            work.wait()
        except DtcommError:
            failed += 1
    if not fails and not cancels:
        assert not failed and not refused
    assert ranks.started == sorted(ranks.started)
    assert len(ranks.started) + failed + len(refused) == len(issued)
    completion.wait_for_threads(10.0)


def test_a_thread_that_has_not_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that exits at once ends before the system has run its threads."""
    started: list[threading.Thread] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
        completion.start_thread(lambda: None, "late")
    begin = time.monotonic()
    completion.wait_for_threads(0.3)
    assert time.monotonic() - begin >= 0.3
    threading.Thread.start(started[0])
    begin = time.monotonic()
    completion.wait_for_threads(20.0)
    assert time.monotonic() - begin < 10
