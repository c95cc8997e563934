"""A relay of TCP connections that can be cut, as a link between two hosts, and restored."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

_POLL_SECONDS = 0.02


class Relay:
    """Passes connections on to a port of this host, in a thread.

    Args:
        port: The port that it connects to.

    Attributes:
        address: Where callers reach it.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers: dict[socket.socket, socket.socket] = {}
        self._is_cut = self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset all connections, and new ones until `restore`."""
        self._is_cut = True
        while self._peers:
            threading.Event().wait(_POLL_SECONDS)

    def restore(self) -> None:
        """Pass connections on again."""
        self._is_cut = False

    def close(self) -> None:
        """Stop relaying and reset all connections."""
        self._is_over = True
        self._thread.join()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_over:
            readable, _, _ = select.select([self._listener, *self._peers], [], [], _POLL_SECONDS)
            if self._is_cut:
                for end in list(self._peers):
                    self._reset(end)
            for end in readable:
                if end is self._listener:
                    self._accept()
                elif end in self._peers:
                    self._pass_on(end)
        for end in list(self._peers):
            self._reset(end)
        self._listener.close()

    def _accept(self) -> None:
        caller, _ = self._listener.accept()
        if self._is_cut:
            _reset(caller)
            return
        try:
            other = socket.create_connection(("127.0.0.1", self._port), timeout=5)
        except OSError:
            _reset(caller)
            return
        self._peers |= {caller: other, other: caller}

    def _pass_on(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            self._peers[end].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._reset(end)

    def _reset(self, end: socket.socket) -> None:
        if end in self._peers:
            other = self._peers.pop(end)
            self._peers.pop(other, None)
            _reset(end)
            _reset(other)


def _reset(connection: socket.socket) -> None:
    """Close a connection so that its other end gets an error."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
