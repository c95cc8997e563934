"""TCP connections between ranks that share no memory: met through the words they exchange, then the engine's."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HELLO = struct.Struct("<8sQI")  # magic, the listener's token, the caller's rank
_MAGIC = b"dtcomm 1"
_MOST_SECONDS = 30.0  # for connections to be made, where the group waits longer
_SIOCGIFADDR = 0x8915


class Listener:
    """Where this rank is called: a listening socket at the address that its peers reach it by.

    GLOO_SOCKET_IFNAME names the interface (or several, of which the first that has an address is taken), as it does
    for Gloo; unset, it is the one of the host's name, else the first that is not the loopback. OSError where there is
    none.
    """

    def __init__(self) -> None:
        self.token = secrets.randbits(64)
        address = _address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)

    def word(self) -> dict[str, Any]:
        """What peers need to call."""
        address, port = self._socket.getsockname()[:2]
        return {"address": address, "port": port, "token": self.token}

    def connect(
        self, rank: int, words: Mapping[int, Mapping[str, Any]], names: Sequence[str], timeout_s: float
    ) -> dict[int, int]:
        """One connected descriptor for each peer in ``words``; OSError names whom there is none to.

        Of two ranks the higher one calls. Nobody waits for anybody's call before he has made his own.
        """
        made: dict[int, socket.socket] = {}
        deadline = time.monotonic() + min(timeout_s, _MOST_SECONDS)
        try:
            for peer in (peer for peer in words if peer < rank):
                made[peer] = _call(words[peer], rank, names[peer], deadline)
            expected = {peer for peer in words if peer > rank}
            while expected - made.keys():
                peer, connected = self._answer(expected, names, deadline)
                made[peer] = connected
            for each in made.values():
                each.setblocking(False)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            for each in made.values():
                each.close()
            raise
        return {peer: each.detach() for peer, each in made.items()}

    def close(self) -> None:
        """Nobody is let in any more."""
        self._socket.close()

    def _answer(self, expected: set[int], names: Sequence[str], deadline: float) -> tuple[int, socket.socket]:
        while True:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                caller, _ = self._socket.accept()
            except TimeoutError:
                missing = ", ".join(names[peer] for peer in sorted(expected))
                raise TimeoutError(
                    f"of {missing} not all have connected to {self.word()['address']}"
                ) from None
            try:
                caller.settimeout(max(0.001, deadline - time.monotonic()))
                said = _receive(caller, _HELLO.size)
                magic, token, peer = _HELLO.unpack(said)
                if (magic, token) == (_MAGIC, self.token) and peer in expected:
                    return peer, caller
            except (OSError, struct.error):
                pass
            caller.close()  # a stranger


def _call(word: Mapping[str, Any], rank: int, name: str, deadline: float) -> socket.socket:
    where = (word["address"], word["port"])
    try:
        made = socket.create_connection(where, timeout=max(0.001, deadline - time.monotonic()))
        made.sendall(_HELLO.pack(_MAGIC, word["token"], rank))
    except OSError as error:
        raise OSError(error.errno, f"{name} cannot be reached at {where[0]}:{where[1]}: {error}") from error
    return made


def _receive(source: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size:
        more = source.recv(size - len(said))
        if not more:
            raise OSError("closed")
        said += more
    return said


def _address() -> str:
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    names = [name for name in chosen.split(",") if name]
    for name in names:
        found = _of_interface(name)
        if found:
            return found
    if names:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise OSError(f"GLOO_SOCKET_IFNAME={chosen}: no such interface has an address; there are {known}")
    for found in (
        _of_host(),
        *(_of_interface(name) for _, name in socket.if_nameindex() if name != "lo"),
    ):
        if found:
            return found
    return "127.0.0.1"


def _of_host() -> str:
    """The address that the host's name stands for, if it is this host's and not the loopback."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, _, _, where in found:
        address = str(where[0])
        if address.startswith("127.") or address == "::1" or "%" in address:
            continue
        try:
            with socket.socket(family, kind) as tried:
                tried.bind((address, 0))
        except OSError:
            continue
        return address
    return ""


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    for line in lines:
        digits, _, _, scope, _, interface = line.split()
        if interface == name and scope == "00":  # global
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""
