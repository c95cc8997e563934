"""Where versions lie: stores of files that are written whole, an index that is written last, and a server of a store.

A store has `put`, `get`, `list` and `delete`. A file is never changed; only the index is replaced. A `Server` lets
others read a store over TCP, a `RemoteStore` is what they read. Both prove that they know DTCOMM_SECRET, and each
message has an HMAC; nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dtcomm.errors import DtcommError, PayloadCorrupt, PeerLost
from dtcomm.runtime import emulated_link
from dtcomm.runtime.bootstrap.tcp import (
    NONCE_BYTES,
    PROOF_BYTES,
    WRONG_SECRET,
    is_proof,
    nonce,
    prove,
    secret,
    warn_of_caller,
)
from dtcomm.system import printable, write_file

_log = logging.getLogger("dtcomm")
INDEX = "index.json"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
_MAGIC, _HEAD = (
    b"dtweigh1",
    struct.Struct(f"<IB{PROOF_BYTES}s"),
)  # of a message: bytes, whether it is an error, HMAC
_CLIENT, _SERVER = b"client", b"server"
# Bytes of a piece, pieces that a connection asks for at once, bytes of a request.
_LEAST_PIECE, _PIECE, _WINDOW, _MOST_REQUEST = 64 << 10, 1 << 20, 8, 1 << 12
_SERVER_POLL_SECONDS = 0.01
_POLL_SECONDS, _HELLO_SECONDS, _RETRY_SECONDS, _LONGEST_WAIT = 0.05, 2.0, 0.25, 20.0
_MOST_CALLERS = 1024


class MissingFile(DtcommError):
    """A store has no such file: it never had, or the version is so old that it was deleted."""


@dataclass(frozen=True)
class Release:
    """One way to a version: from the version before, or as whole weights.

    Attributes:
        version: The version.
        base: The version that the patches are applied to; None: whole weights.
        parts: Name and bytes of each patch.
    """

    version: int
    base: int | None
    parts: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Bytes of all patches."""
        return sum(size for _, size in self.parts)


def read_index(data: bytes) -> tuple[Release, ...]:
    """Return the releases of an index, none if it is empty; PayloadCorrupt if it is not valid."""
    try:
        listed = json.loads(data)["releases"] if data else []
        releases = tuple(
            Release(version, base, tuple((name, size) for name, size in parts))
            for version, base, parts in listed
        )
        numbers = [
            n for each in releases for n in (each.version, each.base or 0, *(size for _, size in each.parts))
        ]
        names = [name for each in releases for name, _ in each.parts]
        if all(type(n) is int and n >= 0 for n in numbers) and all(_NAME.fullmatch(name) for name in names):
            return releases
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    raise PayloadCorrupt("the index of versions is not valid")


def write_index(releases: Sequence[Release]) -> bytes:
    """Return the bytes of an index."""
    listed = [[each.version, each.base, each.parts] for each in releases]
    return json.dumps({"format": 1, "releases": listed}).encode()


def newest(releases: Sequence[Release]) -> int:
    """Return the newest version; -1 if there is none."""
    return max((each.version for each in releases), default=-1)


def route(releases: Sequence[Release], version: int | None) -> list[Release]:
    """Return what leads from a version, None: an unknown one, to the newest in the fewest bytes."""
    goal = newest(releases)
    after = {each.base: each for each in releases if each.base is not None}
    routes = []
    for first in [None, *(each for each in releases if each.base is None)]:
        chain, at = ([], version) if first is None else ([first], first.version)
        while at != goal and at in after:
            chain.append(after[at])
            at = chain[-1].version
        if at == goal:
            routes.append(chain)
    return min(routes, key=lambda chain: sum(each.size for each in chain), default=[])


class Store(Protocol):
    """Files by name; what a publisher writes to and a subscriber reads."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file whole: readers see nothing or all of it."""

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytearray:
        """Return ``size`` bytes from ``offset`` on, all if it is negative; raises MissingFile."""

    def list(self) -> list[str]:
        """Return the names of all files."""

    def delete(self, name: str) -> None:
        """Delete a file."""


class MemoryStore:
    """A store in this process's memory, for a `Server`."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self._files[name] = data

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytearray:
        if name not in self._files:
            raise MissingFile(f"no file {name}")
        return bytearray(memoryview(self._files[name])[offset:][: None if size < 0 else size])

    def list(self) -> list[str]:
        return list(self._files)

    def delete(self, name: str) -> None:
        self._files.pop(name, None)


class DirectoryStore:
    """A store in a folder, which several hosts may share.

    Args:
        path: The folder; it is made if it is not there.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        write_file(self._path / name, data)

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytearray:
        try:
            with open(self._path / name, "rb") as file:
                length = max(0, file.seek(0, 2) - offset)
                data = bytearray(length if size < 0 else min(size, length))
                file.seek(offset)
                return data[: file.readinto(data)]
        except FileNotFoundError:
            raise MissingFile(f"no file {name} in {self._path}") from None

    def list(self) -> list[str]:
        return [path.name for path in self._path.iterdir() if _NAME.fullmatch(path.name)]

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


class ObjectStore:
    """A store that fsspec reaches, such as ``s3://bucket/folder``.

    Args:
        url: The folder.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self._files, self._path = fsspec.core.url_to_fs(url)
        self._files.makedirs(self._path, exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        self._files.pipe_file(f"{self._path}/{name}", data)

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytearray:
        try:
            end = None if size < 0 else offset + size
            return bytearray(self._files.cat_file(f"{self._path}/{name}", start=offset, end=end))
        except FileNotFoundError:
            raise MissingFile(f"no file {name} in {self._path}") from None

    def list(self) -> list[str]:
        self._files.invalidate_cache()
        return [path.rpartition("/")[2] for path in self._files.ls(self._path, detail=False)]

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")


def open_store(location: str | Path | Store, **remote: Any) -> Any:
    """Return the store at a folder, a URL of fsspec, or ``tcp://host:port``; ``remote`` is for `RemoteStore`."""
    if not isinstance(location, (str, Path)):
        return location
    if str(location).startswith("tcp://"):
        return RemoteStore(str(location).removeprefix("tcp://"), **remote)
    return ObjectStore(str(location)) if "://" in str(location) else DirectoryStore(location)


def read_store_index(store: Any, seen: bytes = b"", wait_s: float = 0.0) -> bytes:
    """Return the index of a store, empty if there is none, after a change of ``seen`` or ``wait_s`` seconds."""
    if isinstance(store, RemoteStore):
        return store.index(seen, wait_s)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            data = bytes(store.get(INDEX))
        except MissingFile:
            data = b""
        if data != seen or time.monotonic() >= deadline:
            return data
        time.sleep(_POLL_SECONDS)


class _Seal:
    """The HMACs of one direction of a connection; direction and number keep messages from being repeated."""

    def __init__(self, key: bytes, sender: bytes) -> None:
        self._key, self._sender, self._number = key, sender, 0

    def parts(self, failed: int, body: Any) -> tuple[bytes, ...]:
        self._number += 1
        return self._sender, struct.pack("<QB", self._number, failed), body

    def close(self, body: Any, failed: int = 0) -> bytes:
        return _HEAD.pack(len(body), failed, prove(self._key, *self.parts(failed, body)))

    def check(self, proof: bytes, failed: int, body: Any) -> None:
        if not is_proof(proof, self._key, *self.parts(failed, body)):
            raise ConnectionError(WRONG_SECRET)


class Server:
    """Lets subscribers and relays read a store over TCP, each at its own rate, in a thread.

    Args:
        store: The store, or its folder or URL.
        listen: Address and port, ``host:port``; port 0: a free one.
        upstream: A `RemoteStore`, or ``tcp://host:port``, that is copied into the store: this server is a relay.
        timeout_s: Seconds after which a caller that takes nothing is disconnected.

    Attributes:
        address: ``host:port`` at which it listens.
    """

    def __init__(
        self, store: str | Path | Store, listen: str, *, upstream: Any = None, timeout_s: float = 60.0
    ) -> None:
        self._store, self._timeout_s = open_store(store), timeout_s
        host, _, port = listen.rpartition(":")
        if not port.isdecimal():
            raise ValueError(f"listen={listen!r}: expected host:port")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, int(port)), family=family, backlog=256)
        with contextlib.suppress(OSError):  # a kernel without it, or that does not allow it
            # Between versions connections are idle. CUBIC then starts slowly again; BBR keeps the rate that it found.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        self.address = f"{host or '127.0.0.1'}:{self._socket.getsockname()[1]}"
        links = emulated_link.links()
        self._link, self._free_at, self._callers = links.between or links.inside, 0.0, 0
        self._secret = secret()
        self._ended = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._threads = [threading.Thread(target=self._run, name="dtcomm-weights", daemon=True)]
        if upstream is not None:
            source = open_store(upstream, timeout_s=timeout_s)
            self._threads.append(threading.Thread(target=self._copy, args=(source,), daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _copy(self, source: Any) -> None:
        """Follow another store: its files, then its index."""
        seen = b""
        while not self._ended.is_set():
            try:
                index = source.index(seen, 1.0)
                parts = dict(part for each in read_index(index) for part in each.parts)
                have = set(self._store.list())
                for name, size in parts.items():
                    if name not in have:
                        self._store.put(name, bytes(source.fetch(name, size)))
                if index != seen:
                    self._store.put(INDEX, index)
                    for name in have - parts.keys() - {INDEX}:
                        self._store.delete(name)
                seen = index
            except (
                DtcommError,
                OSError,
            ) as error:  # a file was deleted meanwhile, or the connection has ended
                _log.warning("dtcomm: weights are not copied from upstream: %s", error)
                self._ended.wait(_RETRY_SECONDS)
        source.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._session, sock=self._socket)
        async with server:
            while not self._ended.is_set():
                await asyncio.sleep(_POLL_SECONDS)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = str((writer.get_extra_info("peername") or ("?",))[0])
        self._callers += 1
        reading: asyncio.Task[None] | None = None
        try:
            if self._callers > _MOST_CALLERS:
                return
            opener, closer = await asyncio.wait_for(self._greet(reader, writer, caller), _HELLO_SECONDS)
            requests: asyncio.Queue[tuple[float, dict[str, Any] | None]] = asyncio.Queue(4 * _WINDOW)
            reading = asyncio.ensure_future(self._read(reader, opener, requests))
            while True:
                arrived, request = await requests.get()
                if request is None:
                    return
                try:
                    body, failed = await self._answer(request), 0
                except (DtcommError, OSError, ValueError, TypeError, LookupError) as error:
                    body, failed = str(error).encode(), 1
                await self._pace(arrived, len(body))
                writer.write(closer.close(body, failed))
                writer.write(body)
                await asyncio.wait_for(writer.drain(), self._timeout_s)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._callers -= 1
            if reading is not None:
                reading.cancel()
            writer.transport.abort()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: str
    ) -> tuple[_Seal, _Seal]:
        own = nonce()
        writer.write(_MAGIC + own)
        hello = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
        its, proof = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
        if not is_proof(proof, self._secret, _CLIENT, own, its):
            warn_of_caller(caller, f"refused a subscriber from {caller}: {WRONG_SECRET}")
            raise ConnectionError
        writer.write(prove(self._secret, _SERVER, own, its))
        key = prove(self._secret, own, its)
        return _Seal(key, _CLIENT), _Seal(key, _SERVER)

    async def _read(self, reader: asyncio.StreamReader, opener: _Seal, requests: Any) -> None:
        """Queue requests with the time of their arrival, and None when no more come."""
        try:
            while True:
                length, failed, proof = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                body = await reader.readexactly(min(length, _MOST_REQUEST))
                opener.check(proof, failed, body)
                request = json.loads(body)
                await requests.put((time.monotonic(), request if isinstance(request, dict) else {}))
        except (OSError, EOFError, ValueError, RecursionError):
            await requests.put((0.0, None))

    async def _answer(self, request: dict[str, Any]) -> bytes | bytearray:
        if "index" in request:
            seen, deadline = bytes.fromhex(request["index"]), time.monotonic() + float(request["wait"])
            while True:
                data = read_store_index(self._store)
                if prove(b"", data)[:8] != seen or time.monotonic() >= deadline:
                    return data
                await asyncio.sleep(_SERVER_POLL_SECONDS)
        name, offset, size = request["get"], request["offset"], request["size"]
        if not _NAME.fullmatch(name) or not (0 <= offset and 0 <= size <= _PIECE):
            raise ValueError("no valid request")
        return bytes(self._store.get(name, offset, size))

    async def _pace(self, arrived: float, size: int) -> None:
        """With DTCOMM_EMULATE_LINK, wait as long as such a link would take."""
        if self._link is None:
            return
        begin = max(arrived + 2 * self._link.latency_s, self._free_at)
        self._free_at = begin + size * self._link.ns_per_byte * 1e-9
        if (left := self._free_at - time.monotonic()) > 0:
            await asyncio.sleep(left)


class _Piece(NamedTuple):
    """Bytes of a file that one request asks for, and where they go."""

    name: str
    offset: int
    out: memoryview


def _ignore_errors(call: Callable[[], object]) -> None:
    with contextlib.suppress(DtcommError, OSError):  # the next call makes the connection, or raises
        call()


class _Connection:
    """One connection to a server."""

    def __init__(self, address: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello, own = self._receive(bytearray(len(_MAGIC) + NONCE_BYTES)), nonce()
            its = bytes(hello[len(_MAGIC) :])
            if hello[: len(_MAGIC)] != _MAGIC:
                raise ConnectionError(f"{address} is no server of weights of this version of dtcomm")
            self._socket.sendall(own + prove(secret(), _CLIENT, its, own))
            if not is_proof(bytes(self._receive(bytearray(PROOF_BYTES))), secret(), _SERVER, its, own):
                raise ConnectionError(WRONG_SECRET)
        except BaseException:
            self._socket.close()
            raise
        key = prove(secret(), its, own)
        self._closer, self._opener = _Seal(key, _CLIENT), _Seal(key, _SERVER)

    def ask(self, request: dict[str, Any]) -> None:
        body = json.dumps(request).encode()
        self._socket.sendall(self._closer.close(body) + body)

    def answer(self, out: memoryview | None = None) -> bytearray | memoryview:
        """Receive an answer, into ``out`` if it has its size; MissingFile if the server has no such file."""
        length, failed, proof = _HEAD.unpack(self._receive(bytearray(_HEAD.size)))
        if length > max(_PIECE, 64 << 20):
            raise ConnectionError(f"an answer of {length} bytes")
        body: bytearray | memoryview = self._receive(
            out if out is not None and not failed and len(out) == length else bytearray(length)
        )
        self._opener.check(proof, failed, body)
        if failed:
            raise MissingFile(printable(bytes(body).decode(errors="replace")))
        if out is not None and len(out) != length:
            raise MissingFile(f"{length} bytes of a file, where the index says {len(out)}")
        return body

    def close(self) -> None:
        self._socket.close()

    def _receive(self, out: Any) -> Any:
        view, at = memoryview(out), 0
        while at < len(view):
            received = self._socket.recv_into(view[at:])
            if not received:
                raise ConnectionError("the connection has ended")
            at += received
        return out


class RemoteStore:
    """Reads the store of a `Server`, over several connections, and goes on where a connection has ended.

    Args:
        address: ``host:port`` of the server.
        connections: How many connections carry a file; several fill a long link.
        timeout_s: Seconds without any progress after which a call raises PeerLost.
    """

    def __init__(self, address: str, *, connections: int = 4, timeout_s: float = 60.0) -> None:
        if connections < 1:
            raise ValueError(f"connections={connections}: expected 1 or more")
        self.address, self._timeout_s = address, timeout_s
        self._connections: list[_Connection | None] = [None] * (
            connections + 1
        )  # the first one is for the index
        self.on_progress: Callable[[int], None] = lambda size: None
        self._locks = [threading.Lock() for _ in self._connections]
        self._closed = self._is_used = False

    def index(self, seen: bytes = b"", wait_s: float = 0.0) -> bytes:
        """Return the index, after a change of ``seen`` or ``wait_s`` seconds."""
        if not self._is_used:
            self._is_used = True
            self._connect_ahead()
        begun, deadline = time.monotonic(), time.monotonic() + self._timeout_s + wait_s
        while True:
            wait = max(0.0, min(begun + wait_s - time.monotonic(), _LONGEST_WAIT, self._timeout_s / 2))
            data: bytes = self._retried(0, deadline, functools.partial(self._index, seen=seen, wait_s=wait))
            if data != seen or time.monotonic() >= begun + wait_s:
                return data

    def fetch(self, name: str, size: int, offset: int = 0) -> bytearray:
        """Return ``size`` bytes of a file; raises MissingFile."""
        return self.fetch_all([(name, size)], offset)[0]

    def fetch_all(self, files: Sequence[tuple[str, int]], offset: int = 0) -> list[bytearray]:
        """Return the bytes of files, given by name and size, over all connections at once; raises MissingFile."""
        outs = [bytearray(size) for _, size in files]
        most = len(self._connections) - 1
        # Small files are cut so that each connection carries a part of them.
        step = max(_LEAST_PIECE, min(_PIECE, sum(map(len, outs)) // (4 * most) + 1))
        todo = deque(
            _Piece(name, offset + at, memoryview(out)[at : at + step])
            for (name, _), out in zip(files, outs, strict=True)
            for at in range(0, len(out), step)
        )
        count = max(1, min(most, len(todo)))
        window = min(_WINDOW, -(-len(todo) // count))
        state = {"progress": time.monotonic(), "left": len(todo)}
        errors: list[BaseException] = []

        def carry(number: int) -> None:
            try:
                while state["left"] and not errors and not self._closed:
                    self._retried(
                        number,
                        lambda: state["progress"] + self._timeout_s,
                        lambda c: self._pieces(c, todo, window, state, errors),
                    )
                    if not todo and state["left"]:
                        time.sleep(0.005)  # another connection may end, and leave its pieces
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=carry, args=(number,), daemon=True) for number in range(2, count + 1)
        ]
        for thread in threads:
            thread.start()
        carry(1)
        for thread in threads:
            thread.join(timeout=2 * self._timeout_s)
        if errors:
            raise errors[0]
        return outs

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytearray:
        """Return at most 1 MiB of a file."""
        return self.fetch(name, size, offset)

    def close(self) -> None:
        """End the connections."""
        self._closed = True
        for connection in self._connections:
            if connection is not None:
                connection.close()

    def _index(self, connection: _Connection, seen: bytes, wait_s: float) -> bytes:
        connection.ask({"index": prove(b"", seen)[:8].hex(), "wait": wait_s})
        return bytes(connection.answer())

    def _pieces(
        self, connection: _Connection, todo: deque[_Piece], window: int, state: Any, errors: Any
    ) -> None:
        """Receive pieces until none is left; those that were asked for go back if the connection ends."""
        asked: deque[_Piece] = deque()
        try:
            while not errors and not self._closed:
                while todo and len(asked) < window:
                    with contextlib.suppress(IndexError):
                        asked.append(todo.popleft())
                        piece = asked[-1]
                        connection.ask({"get": piece.name, "offset": piece.offset, "size": len(piece.out)})
                if not asked:
                    return
                connection.answer(asked[0].out)
                size = len(asked.popleft().out)
                state["progress"] = time.monotonic()
                state["left"] -= 1
                # The last pieces are for the connections that are the first to be free.
                window = max(2, min(window, len(todo)))
                self.on_progress(size)
        finally:
            todo.extend(asked)

    def _connect_ahead(self) -> None:
        """Make the connections that carry files while this caller waits for the first version."""
        for number in range(1, len(self._connections)):
            limit = time.monotonic() + self._timeout_s
            call = functools.partial(self._retried, number, limit, lambda connection: None)
            threading.Thread(target=_ignore_errors, args=(call,), daemon=True).start()

    def _retried(self, number: int, deadline: Any, call: Callable[[_Connection], Any]) -> Any:
        """Call with a connection, which is made again where it has ended, until the deadline."""
        limit = deadline if callable(deadline) else lambda: deadline
        while True:
            try:
                with self._locks[number]:
                    connection = self._connections[number]
                    if connection is None:
                        connection = _Connection(self.address, max(0.1, self._timeout_s))
                        self._connections[number] = connection
                return call(connection)
            except OSError as error:
                if (broken := self._connections[number]) is not None:
                    broken.close()
                self._connections[number] = None
                refused = WRONG_SECRET in str(error)
                if self._closed or refused or time.monotonic() + _RETRY_SECONDS >= limit():
                    raise PeerLost(f"the weights at {self.address} cannot be read: {error}") from None
                time.sleep(_RETRY_SECONDS)
