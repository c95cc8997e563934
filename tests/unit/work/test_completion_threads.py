"""Threads that complete futures: order, callbacks that block, and how many threads there are."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from dtcomm.streams import HostStreams
from dtcomm.work import DeferredWork, QueuedWork, TensorsFuture
from dtcomm.work.completion import CompletionThreads
from tests.support.stopwatch import Stopwatch

LIMIT_S = 30


class Items:
    """Threads and the items that they call."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.name = f"items-{id(self)}"
        self.threads = CompletionThreads(self.name, self._items.get, lambda: not self._items.empty())

    def put(self, item: Callable[[], None]) -> None:
        self._items.put(item)
        self.threads.expect()

    def alive(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == self.name]

    def close(self) -> None:
        self._items.put(None)
        self.threads.stop()


@pytest.fixture
def items() -> Iterator[Items]:
    made = Items()
    yield made
    made.close()


def test_items_are_called_in_order_by_one_thread(items: Items) -> None:
    called: list[tuple[int, int]] = []
    done = threading.Event()
    for number in range(200):
        items.put(lambda number=number: called.append((number, threading.get_ident())))
    items.put(done.set)
    assert done.wait(LIMIT_S)
    assert [number for number, _ in called] == list(range(200))
    assert len({thread for _, thread in called}) == 1 and len(items.alive()) <= 2


@pytest.mark.parametrize("says_so", [True, False])
def test_an_item_that_waits_for_a_later_one_does_not_stop_it(items: Items, says_so: bool) -> None:
    came = threading.Event()

    def wait_for_later() -> None:
        if says_so:
            items.threads.hand_over()
        came.wait(LIMIT_S)

    for _ in range(3 if says_so else 1):  # without a word each takes a while
        items.put(wait_for_later)
    watch = Stopwatch()
    items.put(came.set)
    assert came.wait(LIMIT_S) and watch.elapsed().within(cpu_s=1, wall_s=LIMIT_S / 2)


def test_threads_that_are_no_longer_needed_end(items: Items) -> None:
    watch = Stopwatch()
    for _ in range(5):
        release, waiting = threading.Event(), threading.Semaphore(0)

        def block(release: threading.Event = release, waiting: threading.Semaphore = waiting) -> None:
            items.threads.hand_over()
            waiting.release()
            release.wait(LIMIT_S)

        for _ in range(4):
            items.put(block)
        for _ in range(4):
            assert waiting.acquire(timeout=LIMIT_S)
        blocked = items.alive()
        release.set()
    assert len(blocked) > 4
    while len(items.alive()) > 3:  # the leader and two idle ones
        assert watch.elapsed().within(cpu_s=5, wall_s=LIMIT_S)
        time.sleep(0.001)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_item_that_raises_does_not_end_the_thread(items: Items) -> None:
    done = threading.Event()

    def fail() -> None:
        raise MemoryError

    items.put(fail)
    items.put(done.set)
    assert done.wait(LIMIT_S)


def test_a_forked_child_has_threads_of_its_own(items: Items) -> None:
    done = threading.Event()
    items.put(done.set)
    assert done.wait(LIMIT_S)
    child = os.fork()
    if child == 0:
        done = threading.Event()
        items.put(done.set)
        os._exit(0 if done.wait(LIMIT_S) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_callback_of_a_detached_operation_may_wait_for_a_later_one() -> None:
    first, second = (QueuedWork([], HostStreams(), detached=True) for _ in range(2))

    def wait_for_second(done: TensorsFuture) -> None:
        second.get_future().wait()

    waited = first.get_future().then(wait_for_second)
    first.complete()  # on the only thread that can complete the second
    second.complete()
    waited.wait()


def test_a_callback_of_a_deferred_operation_may_wait_for_a_later_one() -> None:
    first, second = (DeferredWork([], torch.futures.Future()) for _ in range(2))
    waited = first.get_future().then(lambda done: second.get_future().wait())
    for work in (first, second):
        ended = QueuedWork([], HostStreams())
        ended.complete()
        work.begin(lambda ended=ended: ended)
    first.connect_future()
    second.connect_future()
    waited.wait()
