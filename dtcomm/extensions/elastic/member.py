"""The connection of a rank to the coordinator."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dtcomm.errors import DtcommError, JoinRefused, PeerLost
from dtcomm.extensions.elastic import protocol
from dtcomm.extensions.elastic.protocol import COORDINATOR, MEMBER, PROTOCOL, Seal, Verdict, View
from dtcomm.runtime.bootstrap.tcp import WRONG_SECRET, nonce, prove, secret
from dtcomm.work import completion

_log = logging.getLogger("dtcomm")
_CONNECT_SECONDS = 30.0  # for one attempt
_PING_SECONDS = 2.0
_RETRY_SECONDS = 0.25  # between two attempts to connect again
_RECONNECT_SECONDS = 5.0  # for one of these; `close` waits for it
_IDENTITY_BYTES = 16


class Member:
    """Joins a coordinator and asks it for votes and views.

    A thread tells the coordinator that this rank lives, receives its answers, and makes another connection when one
    has ended. After ``timeout_s`` without a connection a request raises `PeerLost`.

    Args:
        coordinator: Its address, ``host:port`` or ``[IPv6 address]:port``.
        facts: What must be equal on all members, by name.
        steps: The steps that this rank's state has seen; -1: it has none.
        name: What others call this rank. Default: host and process.

    Raises:
        JoinRefused, OSError: The coordinator has another protocol, or cannot be reached.
    """

    def __init__(
        self,
        coordinator: str,
        facts: Mapping[str, str],
        steps: int = -1,
        name: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        self.host, self._port = protocol.parse_address(coordinator)
        self._address, self._timeout_s = coordinator, timeout_s
        self._hello = {
            "id": os.urandom(_IDENTITY_BYTES).hex(),
            "facts": dict(facts),
            "name": name or f"{socket.gethostname()}, pid {os.getpid()}",
        }
        self._steps = steps
        self._changed = threading.Condition()  # guards all that follows
        self._closed = False
        self._pending: dict[str, Any] | None = None  # the request that has no answer yet
        self._answer: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}  # the last answer
        self._view: dict[str, Any] = {}  # the last one that was a view
        self._round = 0  # the number of answers since the view
        self._error: Exception | None = None
        self._reason = ""  # why there is no connection
        self._lost_at = 0.0
        self._connection: _Connection | None = self._connect(_CONNECT_SECONDS)
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="dtcomm-member", daemon=True)
        self._thread.start()

    def join(self) -> View:
        """Wait for the first view that this rank belongs to; JoinRefused if the coordinator refuses it."""
        try:
            answer = self._wait()
            if answer.get("anew"):
                _log.warning(
                    "dtcomm: %s begins at step 0: all earlier members have left", self._hello["name"]
                )
            return _view(answer)
        except JoinRefused:
            self.close()
            raise

    def vote(self, ok: bool, steps: int) -> Verdict:
        """Tell the others whether an average succeeded here, and wait for theirs."""
        answer = self._ask({"request": "vote", "ok": ok, "steps": steps})
        return Verdict(commit=answer["commit"], change=answer["change"])

    def reform(self, *, admit: bool, steps: int) -> View:
        """Wait for a view without the ranks that are gone; ``admit`` says whether ranks that wait may join."""
        return _view(self._ask({"request": "reform", "ok": admit, "steps": steps}))

    def close(self) -> None:
        """Leave; the others go on without this rank."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._send({"request": "leave", "steps": 0})
            self._changed.notify_all()
        self._waker.close()
        self._thread.join(timeout=5.0)
        self._wake.close()
        if self._connection is not None:
            self._connection.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            self._steps = request["steps"]
            self._pending = {**request, "view": self._view["number"], "round": self._round}
            self._send(self._pending)
        return self._wait()

    def _wait(self) -> dict[str, Any]:
        """Return the next answer; PeerLost if there is no connection for longer than the timeout."""
        # Others decide how long a view or a vote takes.
        completion.wait_for(self._wait_for_answer, interrupted=lambda error: self.close())
        with self._changed:
            answer, self._answer = self._answer, None
            if answer is None:
                raise self._error or PeerLost(
                    f"the coordinator {self._address} is gone for more than {self._timeout_s:g} s: {self._reason}. "
                    "Nothing of this rank's state is lost"
                )
        if "error" in answer:
            raise DtcommError(f"{self._address}: {answer['error']}")
        return answer

    def _wait_for_answer(self, seconds: float) -> bool:
        """Whether there is an answer or an error, or no connection for longer than the timeout."""
        with self._changed:
            if self._answer is not None or self._error is not None:
                return True
            if self._connection is None:
                seconds = min(seconds, self._lost_at + self._timeout_s - time.monotonic())
            if seconds > 0:
                self._changed.wait(seconds)
            return seconds <= 0

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message if there is a connection; if it has ended, the thread notices it too."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(message)

    def _serve(self) -> None:
        """Receive, tell that this rank lives, and connect again, until `close` or a refusal."""
        while not self._closed:
            try:
                if self._connection is None:
                    self._restore(self._connect(_RECONNECT_SECONDS))
                self._receive_from(self._connection)
            except (JoinRefused, OSError, ValueError, LookupError, TypeError) as error:
                self._drop(error)
                if isinstance(error, JoinRefused):
                    return
                wait_readable([self._wake], _RETRY_SECONDS)

    def _drop(self, error: Exception) -> None:
        """Forget the connection, which has ended with an error."""
        with self._changed:
            if self._connection is not None:
                self._connection.close()
                self._lost_at = time.monotonic()
            self._connection, self._reason = None, str(error) or type(error).__name__
            if isinstance(error, JoinRefused):
                self._error = error
            self._changed.notify_all()

    def _restore(self, connection: _Connection) -> None:
        """Use a new connection, and repeat the request that has no answer."""
        with self._changed:
            self._connection = connection
            if self._pending is not None:
                self._send(self._pending)

    def _receive_from(self, connection: _Connection | None) -> None:
        """Take one answer, or tell that this rank lives if there is none for a while."""
        if connection is None:
            return
        readable = wait_readable([connection.socket, self._wake], _PING_SECONDS)
        if self._wake in readable:
            return
        if not readable:
            silent_s = time.monotonic() - connection.heard
            # It is stopped, or the network drops everything.
            if silent_s > max(self._timeout_s, 2 * _PING_SECONDS):
                raise ConnectionError(f"nothing has come from it for {silent_s:.0f} s")
            with self._changed:
                connection.send({"request": "ping", "steps": 0})
            return
        message = connection.receive()
        connection.heard = time.monotonic()
        if "pong" in message:
            return
        if "refused" in message:
            raise JoinRefused(f"{self._address} refused this rank: {message['refused']}")
        with self._changed:
            if "number" in message:
                self._view, self._round = message, 0
            else:
                self._round += 1
            self._pending, self._answer, self._last = None, message, message
            self._changed.notify_all()

    def _connect(self, timeout_s: float) -> _Connection:
        """Connect, exchange nonces with the coordinator, and prove that both know the secret."""
        connection = _Connection(self._address, self.host, self._port, timeout_s)
        try:
            with self._changed:
                place = {"view": self._view, "round": self._round, "last": self._last, "steps": self._steps}
            connection.introduce({**self._hello, **place})
        except BaseException:
            connection.close()
            raise
        return connection


def wait_readable(sockets: Sequence[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Return the sockets that can be read, after at most ``timeout_s``; unlike select with descriptors above 1,023."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return [
            key.fileobj for key, _ in selector.select(timeout_s) if isinstance(key.fileobj, socket.socket)
        ]


class _Connection:
    """An authenticated connection to the coordinator."""

    def __init__(self, address: str, host: str, port: int, timeout_s: float) -> None:
        self._address = address
        self.socket = socket.create_connection((host, port), timeout=timeout_s)
        self.heard = time.monotonic()  # when the last message came
        _configure(self.socket)

    def introduce(self, hello: Mapping[str, Any]) -> None:
        own_nonce = nonce()
        self._opener = Seal(b"", COORDINATOR)
        try:
            greeting = self.receive()
        except ValueError as error:
            raise ConnectionError(f"{self._address} is no dtcomm coordinator: {error}") from error
        if (greeting.get("dtcomm"), greeting.get("protocol")) != ("coordinator", PROTOCOL):
            raise JoinRefused(
                f"{self._address}: protocol {greeting.get('protocol')!r} of the coordinator; this rank has {PROTOCOL}"
            )
        its_nonce = bytes.fromhex(greeting["nonce"])
        self._closer = Seal(prove(secret(), its_nonce), MEMBER)
        self.send({**hello, "nonce": own_nonce.hex()})
        key = prove(secret(), its_nonce, own_nonce)
        self._closer, self._opener = Seal(key, MEMBER), Seal(key, COORDINATOR)

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            self.socket.sendall(self._closer.close(dict(message)))
        except OSError:
            with contextlib.suppress(OSError):
                # This also ends a receive that waits in another thread.
                self.socket.shutdown(socket.SHUT_RDWR)
            raise

    def receive(self) -> dict[str, Any]:
        length, proof = protocol.split_head(self._read(protocol.HEAD.size))
        try:
            return self._opener.open(proof, self._read(length))
        except PermissionError:
            raise JoinRefused(
                f"{self._address}: the coordinator and this rank differ: {WRONG_SECRET}"
            ) from None

    def close(self) -> None:
        self.socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            received = self.socket.recv(count - len(data))
            if not received:
                raise ConnectionError("the connection has ended")
            data += received
        return bytes(data)


def _configure(connection: socket.socket) -> None:
    """Let the kernel notice within half a minute that the coordinator's host has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _view(message: Mapping[str, Any]) -> View:
    numbers = {name: message[name] for name in ("number", "rank", "store_port")}
    return View(**numbers, names=tuple(message["names"]), steps=tuple(message["steps"]))
