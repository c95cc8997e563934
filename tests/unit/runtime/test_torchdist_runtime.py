"""The runtime over a torch.distributed group: operations that meet the end of the group."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.errors import CommunicatorClosed, DtcommError, PeerLost
from dtcomm.runtime.torchdist.faults import forget, watch
from dtcomm.runtime.torchdist.runtime import TorchDistRuntime
from dtcomm.runtime.torchdist.transport import GlooTransport, P2PMessage, Transport
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from dtcomm.streams import HostStreams
from tests.unit.algorithms.every_algorithm import build


class SilentTransport(Transport):
    """A transport that no operation of these tests reaches."""

    name = "silent"
    blocks_host = True

    def close(self) -> None:
        """Do nothing: no connection is open."""


class ClosingStreams(HostStreams):
    """Streams that close the runtime while an operation is on its way into its queue."""

    runtime: TorchDistRuntime

    def record(self) -> None:
        closing = threading.Thread(target=self.runtime.close)
        closing.start()
        closing.join()


def test_an_operation_that_meets_the_end_of_the_runtime_is_refused() -> None:
    streams = ClosingStreams()
    runtime = streams.runtime = TorchDistRuntime(SilentTransport(), streams, 0)
    spec = OpSpec("all_reduce", "sum", (TensorSpec(8, torch.float32, codec("none")),), "ring", 0)
    operation = runtime.prepare(spec, build("ring", "all_reduce", 2, 0))
    x = torch.ones(8)
    with pytest.raises(DtcommError, match="released"):
        operation.submit([Buffers(x, x, None)], [x], 1, None)


class StuckTransport(Transport):
    """A transport whose first wait does not end, as Gloo's where the other rank died at the wrong moment."""

    name = "stuck"
    blocks_host = True

    def __init__(self) -> None:
        self.is_lost = self.progresses = False
        self.waits, self.released, self.closed = 0, threading.Event(), False

    def send_recv(
        self, sends: Sequence[P2PMessage], receives: Sequence[P2PMessage], checksum: bool, context: str
    ) -> Any:
        return [*sends, *receives]

    def wait(self, handle: Any) -> None:
        self.waits += 1
        if not self.released.wait(30.0):
            raise AssertionError("the test has not released the wait")
        raise RuntimeError("the connection has ended")

    def progress(self) -> int:
        self.waits += self.progresses
        return self.waits

    def lost_peer(self) -> DtcommError | None:
        return PeerLost("rank 1 is gone") if self.is_lost else None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def stuck() -> Iterator[tuple[StuckTransport, Any]]:
    """A transport, a runtime over it and an operation of that."""
    transport = StuckTransport()
    runtime = TorchDistRuntime(transport, HostStreams(), 0)
    spec = OpSpec("all_reduce", "sum", (TensorSpec(8, torch.float32, codec("none")),), "ring", 0)
    yield transport, runtime, runtime.prepare(spec, build("ring", "all_reduce", 2, 0))
    transport.released.set()
    runtime.close()


def test_operations_that_wait_for_a_rank_that_is_gone_are_given_up(stuck: Any) -> None:
    transport, _, operation = stuck
    x = torch.ones(8)
    works = [operation.submit([Buffers(x, x, None)], [x], 1, None) for _ in range(3)]
    time.sleep(0.7)
    assert not any(work.is_completed() for work in works)  # late is not lost
    transport.is_lost = True
    begin = time.monotonic()
    for work in works:
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            work.wait()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        operation.run([Buffers(x, x, None)], 1, None)
    assert time.monotonic() - begin < 10
    # The wait ends at last: its error does not replace the first one, and the connections are closed.
    transport.released.set()
    while not transport.closed:
        time.sleep(0.01)
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        operation.run([Buffers(x, x, None)], 1, None)


def test_a_synchronous_call_is_given_up_too(stuck: Any) -> None:
    transport, _, operation = stuck
    transport.is_lost = True
    x = torch.ones(8)
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        operation.run([Buffers(x, x, None)], 1, None)


def test_an_operation_that_makes_progress_is_not_given_up(stuck: Any) -> None:
    """The rank may have done its part and ended."""
    transport, _, operation = stuck
    transport.is_lost = transport.progresses = True
    x = torch.ones(8)
    work = operation.submit([Buffers(x, x, None)], [x], 1, None)
    time.sleep(1.2)
    assert not work.is_completed()


def test_an_operation_that_outlives_its_runtime_fails(stuck: Any) -> None:
    transport, runtime, operation = stuck
    x = torch.ones(8)
    works = [operation.submit([Buffers(x, x, None)], [x], 1, None) for _ in range(2)]
    while not transport.waits:
        time.sleep(0.01)
    runtime.close()
    for work in works:
        with pytest.raises(CommunicatorClosed, match="released"):
            work.wait()


def test_a_look_keeps_nothing_of_an_operation_that_has_ended(stuck: Any) -> None:
    transport, runtime, operation = stuck
    x = torch.ones(8)
    kept = weakref.ref(x)
    work = operation.submit([Buffers(x, x, None)], [], 1, None)
    while not transport.waits:
        time.sleep(0.01)
    runtime.look()
    transport.released.set()
    with pytest.raises(DtcommError):
        work.wait()
    runtime.close()
    del x, work
    gc.collect()
    assert kept() is None


class Looked:
    """A runtime that is busy until it has been looked at ``times`` times; looking at it may fail."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self.times, self.error = times, error

    def busy(self) -> bool:
        return self.times > 0

    def look(self) -> None:
        self.times -= 1
        if self.error is not None:
            raise self.error


def test_a_look_that_fails_does_not_end_the_looks(caplog: pytest.LogCaptureFixture) -> None:
    failing, other = Looked(2, TypeError("no group")), Looked(3)
    watch(failing)
    watch(other)
    later = Looked(1)
    begin = time.monotonic()
    while other.busy() and time.monotonic() - begin < 20:
        time.sleep(0.01)
    assert not failing.busy() and not other.busy()
    assert "no group" in caplog.text
    watch(later)
    while later.busy() and time.monotonic() - begin < 20:
        time.sleep(0.01)
    assert not later.busy()


class LookedAtForLong:
    """A runtime that is busy, and at which a look takes until the test ends it."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def busy(self) -> bool:
        return True

    def look(self) -> None:
        self.begun.set()
        self.end.wait(30.0)


def test_the_thread_that_looks_is_never_the_last_to_refer_to_a_runtime() -> None:
    runtime = LookedAtForLong()
    end = runtime.end
    kept = weakref.ref(runtime)
    watch(runtime)
    assert runtime.begun.wait(30)
    forgetting = threading.Thread(target=forget, args=(runtime,))
    forgetting.start()
    forgetting.join(0.2)
    assert forgetting.is_alive()
    end.set()
    forgetting.join(30)
    assert not forgetting.is_alive()
    del runtime, forgetting
    assert kept() is None


class GlooGroup:
    """A group of two whose messages end when the test sets `end`."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def rank(self) -> int:
        return 0

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda timeout: self.end.wait(30.0))


def test_gloo_s_transport_tells_what_it_waits_for() -> None:
    ended: set[int] = set()
    group = GlooGroup()
    transport = GlooTransport(group, ["rank 0", "rank 1"], 60.0, None, None, ended.__contains__)
    assert transport.lost_peer() is None
    messages = transport.send_recv([], [P2PMessage(torch.empty(4, dtype=torch.uint8), 1, 5)], False, "a call")
    waiting = threading.Thread(target=transport.wait, args=(messages,))
    before = transport.progress()
    waiting.start()
    time.sleep(0.1)
    assert transport.lost_peer() is None and transport.progress() == before
    ended.add(1)
    assert str(transport.lost_peer()).startswith("rank 1 is gone (receiving a call: its process has ended")
    group.end.set()
    waiting.join()
    assert transport.lost_peer() is None and transport.progress() != before
