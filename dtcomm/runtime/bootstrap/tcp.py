"""TCP connections between ranks that share no memory; once made, they belong to the native engine.

A caller says who it is and proves that it knows DTCOMM_SECRET, and the listener proves the same, by HMAC-SHA256 of the
standard library. Proofs keep strangers out; they do not encrypt. Without a secret the key is empty, and a proof is no
more than a checksum.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import logging
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtcomm import env

_log = logging.getLogger("dtcomm")

PROOF_BYTES = 32
NONCE_BYTES = 16
WRONG_SECRET = "it has another DTCOMM_SECRET"

_LENGTH = struct.Struct("<I")

# magic, the listener's token, the caller's rank, which of its connections this is, how often it was made anew,
# whether it only asks to be called, a nonce
_IDENTITY = struct.Struct(f"<8sQIIII{NONCE_BYTES}s")
_HELLO_BYTES = _IDENTITY.size + PROOF_BYTES
_MAGIC = b"dtcomm 4"
_MAX_CONNECT_SECONDS = 30.0  # also if the group's timeout is longer
_HELLO_SECONDS = 1.0  # for a caller to say who it is
_WARN_SECONDS, _MAX_WARNED = 10.0, 256
_warned: dict[
    str, tuple[float, int]
] = {}  # address → when a line was logged, and how many were left out since
_warned_lock = threading.Lock()
_CHECK_SECONDS = 0.05
_SIOCGIFADDR = 0x8915
_TCP_NOTSENT_LOWAT = 25  # linux/tcp.h
# Seconds without data until a connection is tried, between two tries, and how many there are.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
# Of several connections, one that is slow is to hold few bytes that another one could send.
_NOT_SENT_BYTES = 256 * 1024

_Key = tuple[int, int]  # a peer, and which of the connections to it


class Hello(NamedTuple):
    """What a caller says. ``generation`` and ``asks`` are 0 and false while a communicator is made.

    ``asks``: the other end is to call, as this generation of the connection is lost (see `reconnect`).
    """

    rank: int
    number: int
    generation: int
    asks: bool

    def pack(self, token: int) -> bytes:
        """The bytes to send to the listener that has this token, without the proof."""
        return _IDENTITY.pack(_MAGIC, token, self.rank, self.number, self.generation, self.asks, nonce())


class Listener:
    """A listening socket at the address that peers reach this rank by.

    GLOO_SOCKET_IFNAME names the interface, or several of which the first with an address is used, as for Gloo. If it
    is unset, this host's address on the route to ``towards`` is used, the host and port of the group's store; else that
    of the host's name, else the first interface that is not the loopback.
    DTCOMM_PORTS limits the ports. OSError if there is no such interface, or no free port.
    """

    def __init__(self, towards: tuple[str, int] | None = None) -> None:
        self.token = secrets.randbits(64)
        address = _local_address(towards)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = _listen(address, family)
        self._socket.setblocking(False)

    def info(self) -> dict[str, Any]:
        """The address, port and token that peers connect with, and whether a secret is asked for."""
        address, port = self._socket.getsockname()[:2]
        return {"address": address, "port": port, "token": self.token, "has_secret": bool(secret())}

    def connect(
        self,
        rank: int,
        listeners: Mapping[int, Mapping[str, Any]],
        names: Sequence[str],
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        connections: Mapping[int, int] | None = None,
    ) -> dict[int, list[int]]:
        """Connect to all peers; returns the file descriptors for each.

        Of two ranks the higher one connects to the lower one. A rank makes all its own connections before it accepts
        any, and reads the proofs of those that it called last, so ranks do not wait in a circle. OSError names the peer
        that cannot be reached. It ends after ``timeout_s``, at most 30.

        ``listeners`` are the ``info`` of each peer's listener. ``check`` is called while it waits and raises what ends
        the wait. ``connections`` says how many to make, by rank, equal on both ends; one to ranks that are not named.
        """
        counts = {peer: (connections or {}).get(peer, 1) for peer in listeners}
        connected: dict[_Key, socket.socket] = {}
        identities: dict[_Key, bytes] = {}
        deadline = time.monotonic() + min(timeout_s, _MAX_CONNECT_SECONDS)
        try:
            for peer in (peer for peer in listeners if peer < rank):
                listener = listeners[peer]
                for number in range(counts[peer]):  # all at once, as each takes a round trip
                    connected[peer, number] = start_connecting(listener, names[peer])
                for number in range(counts[peer]):
                    identity = Hello(rank, number, 0, False).pack(listener["token"])
                    identities[peer, number] = identity
                    _finish_connecting(connected[peer, number], listener, identity, names[peer], deadline)
            expected = {(peer, number) for peer in listeners if peer > rank for number in range(counts[peer])}
            self._accept(connected, expected, names, deadline, check)
            for key, identity in identities.items():
                _require_proof(connected[key], identity, names[key[0]], deadline, check)
            for (peer, _), connection in connected.items():
                configure(connection, counts[peer] > 1)
        except BaseException:
            for connection in connected.values():
                connection.close()
            raise
        return {
            peer: [connected[peer, number].detach() for number in range(count)]
            for peer, count in counts.items()
        }

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def fileno(self) -> int:
        """The descriptor that is readable while a caller waits."""
        return self._socket.fileno()

    def accept(self) -> Caller | None:
        """The next caller, who has not said yet who it is; None if there is none."""
        try:
            connection, address = self._socket.accept()
        except (BlockingIOError, ConnectionError):  # the caller has gone away
            return None
        connection.setblocking(False)
        return Caller(connection, str(address[0]))

    def _accept(
        self,
        connected: dict[_Key, socket.socket],
        expected: set[_Key],
        names: Sequence[str],
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        """Add the connections of all expected peers. Callers are served side by side: one may say nothing."""
        callers: dict[socket.socket, Caller] = {}
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                while missing := expected - connected.keys():
                    check()
                    now = time.monotonic()
                    if now >= deadline:
                        listing = ", ".join(names[peer] for peer in sorted({peer for peer, _ in missing}))
                        raise TimeoutError(
                            f"of {listing} not all have connected to {self.info()['address']}, the address of"
                            " this rank; GLOO_SOCKET_IFNAME names the interface to use"
                        )
                    for caller in [caller for caller in callers.values() if now >= caller.until]:
                        self._turn_away(caller.connection, callers, selector)
                    for key, _ in selector.select(min(_CHECK_SECONDS, deadline - now)):
                        connection = key.fileobj
                        assert isinstance(connection, socket.socket)
                        if connection is self._socket:
                            if new := self.accept():
                                callers[new.connection] = new
                                selector.register(new.connection, selectors.EVENT_READ)
                            continue
                        caller = callers[connection]
                        if not caller.read():
                            continue
                        hello = self.hello_of(caller)
                        key_of_caller = None if hello is None else (hello.rank, hello.number)
                        if key_of_caller is None or key_of_caller not in missing - connected.keys():
                            self._turn_away(connection, callers, selector)
                        elif answer(caller):
                            selector.unregister(connection)
                            connected[key_of_caller] = callers.pop(connection).connection
                        else:
                            self._turn_away(connection, callers, selector)
        finally:
            for connection in callers:
                connection.close()

    def _turn_away(
        self,
        connection: socket.socket,
        callers: dict[socket.socket, Caller],
        selector: selectors.BaseSelector,
    ) -> None:
        selector.unregister(connection)
        del callers[connection]
        connection.close()

    def hello_of(self, caller: Caller) -> Hello | None:
        """What the caller says; None if it is not of this group or does not know the secret."""
        if len(caller.hello) < _HELLO_BYTES:
            return None
        identity, proof = caller.identity(), bytes(caller.hello[_IDENTITY.size :])
        magic, token, peer, number, generation, asks, _ = _IDENTITY.unpack(identity)
        if (magic, token) != (_MAGIC, self.token):
            return None
        if not is_proof(proof, secret(), b"caller", identity):
            text = f"refused a connection from {caller.address} as rank {peer}: {WRONG_SECRET}"
            warn_of_caller(caller.address, text)
            return None
        return Hello(int(peer), int(number), int(generation), bool(asks))


class Caller:
    """A connection that has not said yet who it is, for which it has a second."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.hello = bytearray()
        self.until = time.monotonic() + _HELLO_SECONDS

    def read(self) -> bool:
        """Read what has come; whether the hello is complete or the caller has gone away."""
        try:
            received = self.connection.recv(_HELLO_BYTES - len(self.hello))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.hello += received
        return not received or len(self.hello) == _HELLO_BYTES

    def identity(self) -> bytes:
        """What it says, without the proof."""
        return bytes(self.hello[: _IDENTITY.size])


def configure(connection: socket.socket, is_one_of_several: bool) -> None:
    """Set the options of a connection that the engine is given."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_one_of_several:
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _NOT_SENT_BYTES)
        # A router may forget a connection without a word: the end that only receives is to notice, too.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _listen(address: str, family: socket.AddressFamily) -> socket.socket:
    """A listening socket at the first port of DTCOMM_PORTS that is free."""
    ports = env.ports()
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, f"cannot listen at {address}:{port}: {error.strerror}") from None
    raise OSError(
        errno.EADDRINUSE,
        f"all {len(ports)} ports of DTCOMM_PORTS={env.get('DTCOMM_PORTS')} are in use at {address}; each rank of a"
        " host needs one while a communicator is made",
    )


def warn_of_caller(address: str, text: str) -> None:
    """Log what a caller did wrong: one line for an address in 10 s, which counts those that were left out."""
    now = time.monotonic()
    with _warned_lock:
        logged_at, left_out = _warned.pop(address, (-math.inf, 0))
        is_due = now >= logged_at + _WARN_SECONDS
        _warned[address] = (now, 0) if is_due else (logged_at, left_out + 1)
        while len(_warned) > _MAX_WARNED:
            del _warned[next(iter(_warned))]
    if is_due:
        more = f" ({left_out} times more before)" if left_out else ""
        _log.warning("dtcomm: %s%s", text, more)


def answer(caller: Caller) -> bool:
    """Prove to a caller that this rank knows the secret; False if the caller has gone away."""
    try:
        # A new socket takes it at once.
        caller.connection.sendall(prove(secret(), b"listener", caller.identity()))
    except OSError:
        return False
    return True


def _require_proof(
    connection: socket.socket, identity: bytes, name: str, deadline: float, check: Callable[[], None]
) -> None:
    """Read the listener's proof that it knows the secret; OSError if it does not come, or is wrong."""
    proof = b""
    connection.settimeout(_CHECK_SECONDS)
    while len(proof) < PROOF_BYTES:
        check()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{name} did not answer")
        try:
            received = connection.recv(PROOF_BYTES - len(proof))
        except TimeoutError:
            continue
        if not received:
            raise ConnectionError(f"{name} refused the connection; possibly {WRONG_SECRET}")
        proof += received
    if not is_proof(proof, secret(), b"listener", identity):
        raise ConnectionError(f"{name} cannot be trusted: {WRONG_SECRET}")


def start_connecting(listener: Mapping[str, Any], name: str) -> socket.socket:
    """Begin to connect; the socket is writable when the connection is there or has failed. OSError if at once."""
    address = (listener["address"], listener["port"])
    connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    result = connection.connect_ex(address)
    if result not in (0, errno.EINPROGRESS):
        connection.close()
        raise _unreachable(listener, name, OSError(result, os.strerror(result)))
    return connection


def with_proof(identity: bytes) -> bytes:
    """What a caller sends: who it is, and the proof that it knows the secret."""
    return identity + prove(secret(), b"caller", identity)


def _finish_connecting(
    connection: socket.socket, listener: Mapping[str, Any], identity: bytes, name: str, deadline: float
) -> None:
    """Wait until a connection is there, and say who calls."""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_WRITE)
            if not selector.select(max(0.001, deadline - time.monotonic())):
                raise TimeoutError("timed out")
        if result := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(result, os.strerror(result))
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.sendall(with_proof(identity))
    except OSError as error:
        raise _unreachable(listener, name, error) from error


def _unreachable(listener: Mapping[str, Any], name: str, error: OSError) -> OSError:
    return OSError(
        error.errno,
        f"{name} cannot be reached at {listener['address']}:{listener['port']}: {error}; GLOO_SOCKET_IFNAME names the"
        " interface by whose address a rank is reached",
    )


def _local_address(towards: tuple[str, int] | None = None) -> str:
    variable = os.environ.get("GLOO_SOCKET_IFNAME", "")
    names = [name for name in variable.split(",") if name]
    for name in names:
        address = _interface_address(name)
        if address:
            return address
    if names:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise OSError(f"GLOO_SOCKET_IFNAME={variable}: no such interface has an address; there are {known}")
    for address in (
        _route_address(towards),
        _host_name_address(),
        *(_interface_address(name) for _, name in socket.if_nameindex() if name != "lo"),
    ):
        if address:
            return address
    return "127.0.0.1"


def _route_address(towards: tuple[str, int] | None) -> str:
    """The address from which this host reaches another one; empty if there is no route, or it is the loopback."""
    if towards is None:
        return ""
    try:
        family, kind, _, _, address = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # which sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if _stays_on_host(own) else own


def _stays_on_host(address: str) -> bool:
    return address.startswith("127.") or address == "::1" or "%" in address


def _host_name_address() -> str:
    """The address of the host's name, if it belongs to this host and is not the loopback."""
    try:
        candidates = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, _, _, sockaddr in candidates:
        address = str(sockaddr[0])
        if _stays_on_host(address):
            continue
        try:
            with socket.socket(family, kind) as probe:
                probe.bind((address, 0))
        except OSError:
            continue
        return address
    return ""


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
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


def secret() -> bytes:
    """The shared secret; empty if DTCOMM_SECRET is not set."""
    return env.get("DTCOMM_SECRET").encode()


def nonce() -> bytes:
    """Random bytes, so that a proof of an earlier connection is of no use."""
    return os.urandom(NONCE_BYTES)


def prove(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of the parts, each of which is preceded by its length."""
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        code.update(_LENGTH.pack(len(part)))
        code.update(part)
    return code.digest()


def is_proof(proof: bytes, key: bytes, *parts: bytes) -> bool:
    """Return whether ``proof`` is that of the parts; the time that it takes tells nothing about the key."""
    return hmac.compare_digest(proof, prove(key, *parts))
