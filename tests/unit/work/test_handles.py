"""Handles of asynchronous operations: completion, errors, callbacks, and what they keep alive."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch

from dtcomm.errors import CollectiveTimeout, DtcommError, PeerLost
from dtcomm.streams import HostStreams
from dtcomm.work import (
    COMPLETED,
    CompositeWork,
    DeferredWork,
    NativeWork,
    QueuedWork,
    Span,
    Statistics,
    TorchWork,
    Work,
)


def queued_work(outputs: list[torch.Tensor] | None = None) -> QueuedWork:
    return QueuedWork(outputs or [], HostStreams())


def completed_work(statistics: Statistics) -> QueuedWork:
    work = queued_work()
    work.complete(None, statistics, [Span("encode", 1, 2, 1)])
    return work


def test_a_queued_operation_completes_its_future_and_its_waiters() -> None:
    tensor = torch.ones(1)
    work = queued_work([tensor])
    future = work.get_future()
    assert work.get_future() is future
    assert not work.is_completed() and not future.done()
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    work.complete(None, Statistics(8, 0.5, 10, 20))
    waiter.join(10)
    assert not waiter.is_alive() and work.is_completed()
    assert future.wait()[0] is tensor
    assert (work.wire_bytes, work.seconds, work.started_ns, work.finished_ns) == (8, 0.5, 10, 20)


def test_a_future_asked_for_after_completion_is_complete() -> None:
    work, failed = queued_work(), queued_work()
    work.complete()
    failed.fail(DtcommError("broken"))
    assert work.get_future().done()
    with pytest.raises(DtcommError, match="broken"):
        failed.get_future().wait()


@pytest.mark.parametrize("wrap", [lambda work: work, lambda work: CompositeWork([work, COMPLETED], ())])
def test_every_wait_raises_the_error(wrap: type) -> None:
    work = queued_work()
    handle: Work = wrap(work)
    future = handle.get_future()
    work.fail(DtcommError("broken"))
    for _ in range(2):
        with pytest.raises(DtcommError, match="broken"):
            handle.wait()
    with pytest.raises(RuntimeError, match="broken"):  # torch's type of what a callback raised
        future.wait()


@pytest.mark.parametrize("fails", [False, True])
def test_no_cycle_keeps_the_tensors_of_a_queued_operation_alive(fails: bool) -> None:
    tensor = torch.ones(1)
    reference = weakref.ref(tensor)
    work = queued_work([tensor])
    del tensor
    future = work.get_future()
    gc.disable()
    try:
        if fails:
            work.fail(DtcommError("broken"))
            with pytest.raises(DtcommError):
                work.wait()
        else:
            work.complete()
        del work, future
        assert reference() is None
    finally:
        gc.enable()


class FailedOperation:
    """An operation of the engine that has failed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def raise_failure(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [MemoryError(), ValueError("x"), SystemExit(), PeerLost("rank 1")])
def test_a_future_completes_whatever_the_engine_raises(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recording_fails(failure: DtcommError) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("dtcomm.work.completion._awaiting_completion", {})
    monkeypatch.setattr("dtcomm._C.notify", lambda native, ticket: None)
    native: Any = FailedOperation(error)
    work = NativeWork(native, (), [], recording_fails)
    future = work.get_future()
    with contextlib.suppress(OSError):
        work.complete()
    assert future.done()
    with pytest.raises(type(error) if isinstance(error, Exception) else DtcommError):
        future.wait()


def test_a_composite_without_parts_is_complete() -> None:
    tensor = torch.ones(1)
    work = CompositeWork((), [tensor])
    work.wait()
    assert work.is_completed() and work.get_future().wait()[0] is tensor
    assert work.statistics() == Statistics(0, 0, 0, 0)


def test_a_composite_adds_up_its_parts() -> None:
    parts = [completed_work(Statistics(8, 0.5, 0, 20)), completed_work(Statistics(4, 0.25, 10, 15))]
    work = CompositeWork(parts, ())
    assert work.statistics() == Statistics(12, 0.75, 10, 20)
    assert len(work.spans()) == 2
    assert CompositeWork([*parts, completed_work(Statistics(1, None))], ()).seconds is None


@pytest.mark.parametrize("parts", [1, 2])
def test_a_callback_runs_once_before_any_thread_sees_the_result(parts: int) -> None:
    works = [queued_work() for _ in range(parts)]
    calls, results = [], []

    def callback() -> None:
        time.sleep(0.02)
        calls.append(1)

    work = CompositeWork(works, (), callback)
    future = work.get_future()

    def wait() -> None:
        work.wait()
        results.append(len(calls))

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    for part in works:
        part.complete()
    for waiter in waiters:
        waiter.join(10)
    future.wait()
    assert results == [1, 1, 1] and calls == [1]


def test_a_callback_that_raises_fails_every_wait() -> None:
    def check() -> None:
        raise DtcommError("the ranks differ")

    work = CompositeWork((), (), check)
    for _ in range(2):
        with pytest.raises(DtcommError, match="differ"):
            work.wait()
    with pytest.raises(RuntimeError, match="differ"):
        work.get_future().wait()


def test_a_deferred_operation_has_the_statistics_of_the_one_that_it_starts() -> None:
    work = DeferredWork((), torch.futures.Future())
    assert not work.is_completed()
    work.begin(lambda: completed_work(Statistics(8, 0.5, 10, 20)))
    work.connect_future()
    work.wait()
    work.get_future().wait()
    assert work.is_completed() and len(work.spans()) == 1
    assert work.statistics() == Statistics(8, 0.5, 10, 20)


def test_torch_handles_time_out() -> None:
    part = queued_work()
    work = TorchWork(part, [torch.ones(2)], 0.01)
    composite = TorchWork(CompositeWork([work, TorchWork(COMPLETED, ())], work.outputs), work.outputs)
    for handle in (work, composite):
        with pytest.raises(CollectiveTimeout, match=r"shape \(2,\)"):
            handle.wait()
        with pytest.raises(CollectiveTimeout):
            handle.wait(timedelta(seconds=0.02))
        assert not handle.is_completed() and not handle.is_success() and handle.exception() is None
    part.complete()
    for handle in (work, composite):
        assert handle.wait() and handle.is_success() and handle.result() == work.outputs
        assert handle.get_future().wait() == work.outputs


def test_a_torch_handle_returns_the_exception() -> None:
    part, error = queued_work(), DtcommError("broken")
    work = TorchWork(part, ())
    part.fail(error)
    assert work.exception() is error and work.is_completed() and not work.is_success()


def test_a_forked_child_runs_no_callback_of_its_parent() -> None:
    release, calls = threading.Event(), []
    first, second = (QueuedWork([], HostStreams(), detached=True) for _ in range(2))
    blocked = first.get_future().then(lambda done: release.wait(30))
    called = second.get_future().then(lambda done: calls.append(1))
    first.complete()
    second.complete()
    child = os.fork()
    if child == 0:
        before = len(calls)
        own = QueuedWork([], HostStreams(), detached=True)
        future = own.get_future()
        own.complete()
        future.wait()
        os._exit(len(calls) - before)
    assert os.waitpid(child, 0)[1] == 0
    release.set()
    blocked.wait()
    called.wait()
