"""The connection of a rank to the coordinator."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from dtcomm.elastic.protocol import (
    COORDINATOR,
    HEAD,
    MEMBER,
    PROTOCOL,
    Seal,
    Verdict,
    View,
    parse_address,
    split_head,
)
from dtcomm.errors import DtcommError, JoinRefused, PeerLost
from dtcomm.runtime.bootstrap.authentication import WRONG_SECRET, nonce, prove, secret

_CONNECT_SECONDS = 30.0
_PING_SECONDS = 2.0


class Member:
    """Joins a coordinator and asks it for votes and views. A thread tells the coordinator that this rank lives.

    Args:
        coordinator: Its address, ``host:port`` or ``[IPv6 address]:port``.
        facts: What must be equal on all members, by name.
        steps: The steps that this rank's state has seen; -1: it has none.
        name: What others call this rank. Default: host and process.

    Raises:
        JoinRefused: The coordinator has another protocol.
        OSError: It cannot be reached.
    """

    def __init__(self, coordinator: str, facts: Mapping[str, str], steps: int = -1, name: str = "") -> None:
        self.host, port = parse_address(coordinator)
        self._address = coordinator
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._socket = socket.create_connection((self.host, port), timeout=_CONNECT_SECONDS)
        try:
            _configure(self._socket)
            self._introduce(facts, steps, name or f"{socket.gethostname()}, pid {os.getpid()}")
        except BaseException:
            self._socket.close()
            raise
        self._socket.settimeout(None)  # others decide how long a view or a vote takes
        self._pinger = threading.Thread(target=self._ping, name="dtcomm-member", daemon=True)
        self._pinger.start()

    def join(self) -> View:
        """Wait for the first view that this rank belongs to; JoinRefused if the coordinator refuses it."""
        try:
            return _view(self._receive())
        except JoinRefused:
            self.close()
            raise

    def vote(self, ok: bool, steps: int) -> Verdict:
        """Tell the others whether an average succeeded here, and wait for theirs.

        Args:
            ok: Whether it succeeded.
            steps: The steps that this rank's state has seen.
        """
        answer = self._ask({"request": "vote", "ok": ok, "steps": steps})
        return Verdict(commit=answer["commit"], change=answer["change"])

    def reform(self, *, admit: bool, steps: int) -> View:
        """Wait for a view without the ranks that are gone.

        Args:
            admit: Whether ranks that wait may join.
            steps: The steps that this rank's state has seen; -1: it has none.
        """
        return _view(self._ask({"request": "reform", "ok": admit, "steps": steps}))

    def close(self) -> None:
        """Leave; the others go on without this rank."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._send({"request": "leave", "steps": 0})
        self._pinger.join()
        self._socket.close()

    def _introduce(self, facts: Mapping[str, str], steps: int, name: str) -> None:
        """Exchange nonces with the coordinator, and prove that both know the secret."""
        own_nonce = nonce()
        self._opener = Seal(b"", COORDINATOR)
        greeting = self._receive()
        if (greeting.get("dtcomm"), greeting.get("protocol")) != ("coordinator", PROTOCOL):
            raise JoinRefused(
                f"{self._address}: protocol {greeting.get('protocol')!r} of dtcomm.elastic; this rank has {PROTOCOL}"
            )
        its_nonce = bytes.fromhex(greeting["nonce"])
        self._closer = Seal(prove(secret(), its_nonce), MEMBER)
        self._send({"nonce": own_nonce.hex(), "facts": dict(facts), "steps": steps, "name": name})
        key = prove(secret(), its_nonce, own_nonce)
        self._closer, self._opener = Seal(key, MEMBER), Seal(key, COORDINATOR)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._send(request)
        except OSError as error:
            raise self._lost(error) from error
        return self._receive()

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._socket.sendall(self._closer.close(message))

    def _receive(self) -> dict[str, Any]:
        try:
            length, proof = split_head(self._read(HEAD.size))
            message = self._opener.open(proof, self._read(length))
        except PermissionError:
            raise JoinRefused(
                f"{self._address}: the coordinator and this rank differ: {WRONG_SECRET}"
            ) from None
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        if "refused" in message:
            raise JoinRefused(f"{self._address} refused this rank: {message['refused']}")
        if "error" in message:
            raise DtcommError(f"{self._address}: {message['error']}")
        return message

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            received = self._socket.recv(count - len(data))
            if not received:
                raise ConnectionError("the connection has ended")
            data += received
        return bytes(data)

    def _lost(self, error: Exception) -> PeerLost:
        return PeerLost(
            f"the coordinator {self._address} is gone, or has removed this rank: {error}. Nothing of this rank's "
            "state is lost"
        )

    def _ping(self) -> None:
        while not self._closed.wait(_PING_SECONDS):
            try:
                self._send({"request": "ping", "steps": 0})
            except OSError:
                return


def _configure(connection: socket.socket) -> None:
    """Let the kernel notice within half a minute that the coordinator's host has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _view(message: dict[str, Any]) -> View:
    return View(
        number=message["number"],
        rank=message["rank"],
        names=tuple(message["names"]),
        steps=tuple(message["steps"]),
        store_port=message["store_port"],
    )
