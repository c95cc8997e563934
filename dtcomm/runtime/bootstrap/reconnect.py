"""Making connections anew that have ended, of peers with several: docs/how-it-works/engine.md describes it.

A thread keeps the listener of a communicator open. It sleeps until the engine says that connections have ended, or a
peer calls. Each peer can be waited for without delaying the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from dtcomm import _C
from dtcomm.runtime.bootstrap.tcp import (
    PROOF_BYTES,
    WRONG_SECRET,
    Caller,
    Hello,
    Listener,
    answer,
    configure,
    is_proof,
    secret,
    start_connecting,
    with_proof,
)

_log = logging.getLogger("dtcomm")

GRACE_S = 0.05  # for the goodbye of a peer that closes its connections to arrive
ASK_S, ASK_CUT_OFF_S = 1.0, 0.5  # without a call of the peer; the latter if no connection is left
ATTEMPT_S = 5.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
MAX_TURNED_AWAY = 3  # in a row, until another process is believed to listen there
MAX_CALLERS = 64  # at once, that have not said who they are

_keepers: weakref.WeakSet[ConnectionKeeper] = weakref.WeakSet()
_Key = tuple[int, int]  # a peer, and which of the connections to it


class ConnectionKeeper:
    """Makes connections of a communicator anew, in a thread of its own, until ``close``.

    It closes ``listener`` with itself and keeps no reference to ``native`` that keeps it alive. ``peers`` are
    ``Listener.info`` of the peers with several connections, and ``counts`` how many there are, that of short frames
    included. A connection is tried for ``timeout_s``.
    """

    def __init__(
        self,
        native: _C.NativeCommunicator,
        rank: int,
        listener: Listener,
        peers: Mapping[int, Mapping[str, Any]],
        counts: Mapping[int, int],
        names: Sequence[str],
        timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self._native = weakref.ref(native)
        self._rank = rank
        self._listener = listener
        self._peers = dict(peers)
        self._counts = dict(counts)
        self._names = list(names)
        self._ended, self._stop = _Event(), _Event()
        self._selector = selectors.DefaultSelector()
        for fd, kind in ((self._ended, "ended"), (self._stop, "stop"), (listener, "listener")):
            self._selector.register(fd, selectors.EVENT_READ, kind)
        self._losses: dict[_Key, _Loss] = {}
        self._look_at: float | None = None  # when to ask the engine what has ended
        self._accepts_at: float | None = None  # when to accept callers again
        self._given_up: set[int] = set()
        native.allow_restoring(self._ended.fileno())
        self._thread = threading.Thread(target=self._run, name="dtcomm-connections", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(native, self._stop.set)
        self._finalizer.atexit = False
        _keepers.add(self)

    def close(self) -> None:
        """Stop; to be called when the communicator has been closed, so that what it sends last can still be sent."""
        self._finalizer.detach()
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except Exception:  # the connections that are left go on, and a peer is lost with its last one
            _log.exception("dtcomm: connections that end are not made anew any more")
            if (native := self._native()) is not None:
                for peer in self._peers:
                    native.give_up(peer, "it could not be made anew: the thread that does so has failed")
        finally:
            for loss in self._losses.values():
                loss.drop(self._selector)
            for caller in self._callers():
                caller.connection.close()
            self._selector.close()
            self._listener.close()
            self._ended.close()
            self._stop.close()

    def _run_once(self) -> bool:
        """Wait for what comes next and handle it; False if there is nothing to do any more."""
        ready = self._selector.select(self._wait_s())
        kinds = {key.data for key, _ in ready if isinstance(key.data, str)}
        native = self._native()
        if native is None or "stop" in kinds:
            return False
        if "ended" in kinds:
            self._ended.clear()
            self._look_at = self._look_at or time.monotonic() + GRACE_S
        if "listener" in kinds:
            self._accept()
        for key, _ in ready:
            if isinstance(key.data, Caller) and key.data.read():
                self._serve(native, key.data)
            elif isinstance(key.data, _Loss) and key.data.attempt is not None:
                key.data.attempt.advance(self._selector, key.data)
                self._conclude(native, key.data)
        now = time.monotonic()
        for caller in self._callers():
            if now >= caller.until:
                self._turn_away(caller)
        if self._accepts_at is not None and now >= self._accepts_at:
            self._accepts_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        if self._look_at is not None and now >= self._look_at:
            self._look_at = None
            self._find_losses(native)
        for loss in list(self._losses.values()):
            if loss.attempt is not None and now >= loss.attempt.until:
                loss.attempt.outcome = "it did not answer"
                self._conclude(native, loss)
            elif loss.attempt is None and now >= loss.next_try:
                self._try(native, loss)
        return True

    def _wait_s(self) -> float | None:
        """How long nothing is to be done; None: until something happens."""
        times = [] if self._look_at is None else [self._look_at]
        times += [loss.attempt.until if loss.attempt else loss.next_try for loss in self._losses.values()]
        times += [caller.until for caller in self._callers()]
        times += [] if self._accepts_at is None else [self._accepts_at]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _callers(self) -> list[Caller]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, Caller)]

    def _accept(self) -> None:
        """Take the next caller; pause if no descriptor is left, or if too many have not said who they are."""
        caller = None
        try:
            if len(self._callers()) < MAX_CALLERS:
                caller = self._listener.accept()
                if caller is None:  # it has gone away
                    return
        except OSError as error:
            _log.warning("dtcomm: cannot accept a connection: %s", error)
        if caller is not None:
            self._selector.register(caller.connection, selectors.EVENT_READ, caller)
            return
        self._selector.unregister(self._listener)
        self._accepts_at = time.monotonic() + MIN_PAUSE_S

    def _find_losses(self, native: _C.NativeCommunicator) -> None:
        lost = {
            (peer, number): (generation, why) for peer, number, generation, why in native.lost_connections()
        }
        for key in self._losses.keys() - lost.keys():  # called by the peer, or it has closed
            self._losses.pop(key).drop(self._selector)
        new: dict[int, list[str]] = {}
        now = time.monotonic()
        for key, (generation, why) in lost.items():
            peer = key[0]
            if key not in self._losses:
                left = self._counts[peer] - sum(of == peer for of, _ in lost)
                wait_s = 0.0 if peer < self._rank else ASK_S if left else ASK_CUT_OFF_S
                self._losses[key] = _Loss(*key, generation, now, now + wait_s)
                new.setdefault(peer, []).append(why)
            elif self._losses[key].lost_generation != generation:
                self._losses[key].lost_generation = generation
        for peer, reasons in new.items():
            _log.warning(
                "dtcomm: %d of %d connections to %s ended (%s); making %s anew",
                len(reasons),
                self._counts[peer],
                self._names[peer],
                reasons[0],
                "it" if len(reasons) == 1 else "them",
            )

    def _try(self, native: _C.NativeCommunicator, loss: _Loss) -> None:
        if not any(lost[:2] == (loss.peer, loss.number) for lost in native.lost_connections()):
            del self._losses[loss.peer, loss.number]  # the peer has closed
            return
        if time.monotonic() - loss.since > self.timeout_s:
            del self._losses[loss.peer, loss.number]
            _log.warning(
                "dtcomm: connection %d to %s could not be made anew within %g s (%s)",
                loss.number,
                self._names[loss.peer],
                self.timeout_s,
                loss.problem,
            )
            if self._is_cut_off(native, loss.peer):
                self._give_up(native, loss.peer, f"it could not be made anew: {loss.problem}")
            return
        asks = loss.peer > self._rank
        if not asks:
            loss.tried_generation = max(loss.tried_generation, loss.lost_generation) + 1
        generation = loss.lost_generation if asks else loss.tried_generation
        hello = Hello(self._rank, loss.number, generation, asks)
        loss.attempt = _Attempt(self._peers[loss.peer], hello, self._names[loss.peer])
        loss.attempt.start(self._selector, loss)
        self._conclude(native, loss)

    def _conclude(self, native: _C.NativeCommunicator, loss: _Loss) -> None:
        attempt = loss.attempt
        if attempt is None or attempt.outcome is None:
            return
        loss.attempt = None
        attempt.forget(self._selector)
        if not attempt.outcome:
            loss.turned_away = 0
            if attempt.hello.asks:
                attempt.connection.close()  # the peer is going to call
                loss.problem = "the peer does not call"
            elif self._restore(native, attempt.connection, attempt.hello, loss.peer):
                return
            else:
                attempt.connection.close()
        else:
            attempt.close()
            loss.problem = attempt.outcome
            loss.turned_away = loss.turned_away + 1 if attempt.was_turned_away else 0
            is_gone = attempt.was_refused or loss.turned_away >= MAX_TURNED_AWAY
            if is_gone and self._is_cut_off(native, loss.peer):
                self._give_up(native, loss.peer, f"{self._reason_of(native, loss)}, and {loss.problem}")
                for key in [key for key in self._losses if key[0] == loss.peer]:
                    self._losses.pop(key).drop(self._selector)
                return
        loss.next_try = time.monotonic() + loss.pause_s
        loss.pause_s = min(2 * loss.pause_s, MAX_PAUSE_S)

    def _give_up(self, native: _C.NativeCommunicator, peer: int, reason: str) -> None:
        self._given_up.add(peer)
        native.give_up(peer, reason)

    def _reason_of(self, native: _C.NativeCommunicator, loss: _Loss) -> str:
        reasons = {
            (peer, number): why for peer, number, _, why in native.lost_connections() if peer == loss.peer
        }
        return reasons.get((loss.peer, 0), "closed by the peer")

    def _is_cut_off(self, native: _C.NativeCommunicator, peer: int) -> bool:
        return sum(of == peer for of, *_ in native.lost_connections()) == self._counts[peer]

    def _restore(
        self, native: _C.NativeCommunicator, connection: socket.socket, hello: Hello, peer: int
    ) -> bool:
        """Give the engine a connection; False if it does not want it."""
        configure(connection, True)
        try:
            restored = native.restore_connection(peer, hello.number, hello.generation, connection.fileno())
        except OSError:  # the socket has been closed
            return False
        if not restored:
            return False
        connection.detach()
        loss = self._losses.pop((peer, hello.number), None)
        took = ""
        if loss is not None:
            loss.drop(self._selector)
            took = f" after {time.monotonic() - loss.since:.2f} s"
        _log.warning("dtcomm: connection %d to %s was made anew%s", hello.number, self._names[peer], took)
        return True

    def _serve(self, native: _C.NativeCommunicator, caller: Caller) -> None:
        hello = self._listener.hello_of(caller)
        if (
            hello is None
            or hello.rank not in self._peers
            or hello.rank in self._given_up
            or hello.number >= self._counts[hello.rank]
            or hello.asks == (hello.rank > self._rank)
            or not answer(caller)
        ):
            self._turn_away(caller)
            return
        if hello.asks:
            self._turn_away(caller)
            native.end_connection(hello.rank, hello.number, hello.generation)
            return
        self._selector.unregister(caller.connection)
        if not self._restore(native, caller.connection, hello, hello.rank):
            caller.connection.close()

    def _turn_away(self, caller: Caller) -> None:
        self._selector.unregister(caller.connection)
        caller.connection.close()

    def close_in_child(self) -> None:
        """Close the copies that a forked child has: the peers are to see this process end, and its thread goes on."""
        with contextlib.suppress(OSError):
            self._listener.close()
        for loss in self._losses.values():
            if loss.attempt is not None:
                loss.attempt.close()
        # The thread may have been at work on the selector.
        with contextlib.suppress(OSError, RuntimeError, AttributeError):
            for caller in self._callers():
                caller.connection.close()
            self._selector.close()
        self._ended.close_in_child()
        self._stop.close_in_child()


class _Loss:
    """A connection that is to be made anew."""

    def __init__(self, peer: int, number: int, generation: int, since: float, next_try: float) -> None:
        self.peer = peer
        self.number = number
        self.lost_generation = generation
        self.tried_generation = 0
        self.since = since
        self.next_try = next_try
        self.pause_s = MIN_PAUSE_S
        self.problem = "it was not tried"
        self.turned_away = 0
        self.attempt: _Attempt | None = None

    def drop(self, selector: selectors.BaseSelector) -> None:
        if self.attempt is not None:
            self.attempt.forget(selector)
            self.attempt.close()
            self.attempt = None


class _Attempt:
    """A call, or a request for one. ``outcome`` is empty if it succeeded, else why not; None until that is known."""

    connection: socket.socket

    def __init__(self, listener: Mapping[str, Any], hello: Hello, name: str) -> None:
        self.hello = hello
        self.until = time.monotonic() + ATTEMPT_S
        self.outcome: str | None = None
        self.was_refused = self.was_turned_away = False
        self._listener = listener
        self._name = name
        self._identity = hello.pack(listener["token"])
        self._proof: bytearray | None = None  # None until the connection is there

    def start(self, selector: selectors.BaseSelector, loss: _Loss) -> None:
        try:
            self.connection = start_connecting(self._listener, self._name)
        except OSError as error:
            self._fail(error)
            return
        selector.register(self.connection, selectors.EVENT_WRITE, loss)

    def advance(self, selector: selectors.BaseSelector, loss: _Loss) -> None:
        """Go on when the socket is ready."""
        try:
            if self._proof is None:
                if result := self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(result, os.strerror(result))
                self._proof = bytearray()
                self.connection.sendall(with_proof(self._identity))  # a new socket takes it at once
                selector.modify(self.connection, selectors.EVENT_READ, loss)
                return
            received = self.connection.recv(PROOF_BYTES - len(self._proof))
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
            return
        self._proof += received
        if not received:
            self._turned_away(f"its listener turned the caller away; possibly {WRONG_SECRET}")
        elif len(self._proof) == PROOF_BYTES:
            if is_proof(bytes(self._proof), secret(), b"listener", self._identity):
                self.outcome = ""
            else:
                self._turned_away(f"its listener cannot be trusted: {WRONG_SECRET}")

    def forget(self, selector: selectors.BaseSelector) -> None:
        if hasattr(self, "connection") and self.connection.fileno() >= 0:
            with contextlib.suppress(KeyError):
                selector.unregister(self.connection)

    def close(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()

    def _fail(self, error: OSError) -> None:
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            self._turned_away(str(error))
            return
        self.was_refused = isinstance(error, ConnectionRefusedError)
        self.outcome = "its host refuses another one" if self.was_refused else str(error)

    def _turned_away(self, why: str) -> None:
        self.was_turned_away = True
        self.outcome = why


class _Event:
    """An eventfd that may be set after it has been closed, when its number may belong to another file.

    Where a sandbox refuses it, a datagram socket that is connected to itself is used alike.
    """

    def __init__(self) -> None:
        try:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            own.bind("")  # the kernel chooses a name
            own.connect(own.getsockname())
            self._fd = own.detach()
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        with self._lock:
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):  # it is set many times
                    os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self._fd)

    def close_in_child(self) -> None:
        self._lock = threading.Lock()  # a thread that the child does not have may hold the other one
        if not self._is_closed:
            self.close()


def _close_in_child() -> None:
    for keeper in _keepers:
        keeper.close_in_child()
    _keepers.clear()


os.register_at_fork(after_in_child=_close_in_child)
