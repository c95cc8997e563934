"""A server of a store, and the store that its callers see.

Both prove that they know DTCOMM_SECRET, and each message has an HMAC; nothing is encrypted.

While a version is being published, the index lists it as open, with the parts that are complete. A caller that has the
previous version asks the server for pieces by number, before they exist; the server sends each as soon as it has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtcomm.errors import DtcommError, PeerLost
from dtcomm.extensions.elastic.protocol import HEAD, Seal, parse_address
from dtcomm.extensions.weights.files import (
    INDEX,
    NAME,
    DirectoryStore,
    Files,
    Index,
    MissingFile,
    ObjectStore,
    Release,
    Store,
)
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
from dtcomm.system import printable

_log = logging.getLogger("dtcomm")
__all__ = ["MissingFile", "RemoteStore", "Server", "Store", "open_store"]
_MAGIC, _CLIENT, _SERVER = b"dtweigh2", b"client", b"server"
_DONE, _FAILED = b"\0", b"\1"  # the first byte of an answer
# Bytes of a piece, pieces that a connection asks for at once, bytes of a request and of an answer.
_LEAST_PIECE, _PIECE, _WINDOW, _MOST_REQUEST, _MOST_ANSWER = 64 << 10, 512 << 10, 16, 1 << 12, 64 << 20
_HELLO_SECONDS, _RETRY_SECONDS, _LONGEST_WAIT, _END_SECONDS = 2.0, 0.25, 20.0, 0.05
_MOST_CALLERS, _MOST_STREAMS = 1024, 8


def open_store(location: str | Path | Store, **remote: Any) -> Any:
    """Return the store at a folder, a URL of fsspec, or ``tcp://host:port``; ``remote`` is for `RemoteStore`."""
    if not isinstance(location, (str, Path)):
        return location
    if str(location).startswith("tcp://"):
        return RemoteStore(str(location).removeprefix("tcp://"), **remote)
    return ObjectStore(str(location)) if "://" in str(location) else DirectoryStore(location)


@dataclass
class _Stream:
    """The pieces of the version behind an index, as it is published: name, offset, bytes, and bytes of the file."""

    pieces: list[tuple[str, int, int, int]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    sealed: bool = False

    def add(self, release: Release) -> None:
        for name, size in release.parts:
            if name not in self.names:
                self.names.add(name)
                self.pieces += [(name, at, min(_PIECE, size - at), size) for at in range(0, size, _PIECE)]


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
        host, port = parse_address(listen, "listen")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=256)
        with contextlib.suppress(OSError):  # a kernel without it, or that does not allow it
            # Between versions connections are idle. CUBIC then starts slowly again; BBR keeps the rate that it found.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        self.address = f"{host or '127.0.0.1'}:{self._socket.getsockname()[1]}"
        links = emulated_link.links()
        self._link, self._free_at, self._callers = links.between or links.inside, 0.0, 0
        self._secret, self._ended = secret(), threading.Event()
        self._data, self._token = b"", Index().token
        self._streams = {self._token: _Stream()}
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

    def _copy(self, source: Store) -> None:
        """Follow another store: its files, then its index."""
        seen = Index()
        while not self._ended.is_set():
            try:
                index, opened = Index.read(source.index())._replace(opened=None), list[tuple[str, int]]()
                while not self._ended.is_set():
                    names = set(self._store.list())
                    parts = [part for each in index.releases for part in each.parts]
                    for name, data in source.fetch(part for part in parts if part[0] not in names):
                        self._store.put(name, bytes(data))
                    if index != seen:
                        self._store.put(INDEX, index.write())
                        for name in names - {INDEX, *dict(parts)}:
                            self._store.delete(name)
                    seen, opened = index, []
                    for name, data in source.follow(index, 1.0):
                        if name == INDEX:
                            index = Index.read(bytes(data))._replace(opened=None)
                            continue
                        self._store.put(name, bytes(data))
                        opened.append((name, len(data)))
                        now = Index(index.releases, Release(index.newest + 1, None, tuple(opened)))
                        self._store.put(INDEX, now.write())
            except (
                DtcommError,
                OSError,
            ) as error:  # a file was deleted meanwhile, or the connection has ended
                _log.warning("dtcomm: weights are not copied from upstream: %s", error)
                self._ended.wait(_RETRY_SECONDS)
        source.close()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._changed = asyncio.Event()
        self._look()
        server = await asyncio.start_server(self._session, sock=self._socket)
        async with server:
            while not self._ended.is_set():
                await asyncio.sleep(self._store.poll_s)
                self._look()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    def _look(self) -> None:
        """Note what has been published since the last look."""
        try:
            data = self._store.index()
            if data == self._data:
                return
            index = Index.read(data)
        except (DtcommError, OSError) as error:
            _log.warning("dtcomm: the index of versions cannot be read: %s", error)
            return
        stream = self._streams[self._token]
        if index.token != self._token:
            # The server did not see this version as open. Callers that have the previous version take the patch.
            latest = [each for each in index.releases if each.version == index.newest]
            for release in sorted(latest, key=lambda each: each.base is None)[:1]:
                stream.add(release)
            stream.sealed = True
            stream = self._streams[index.token] = _Stream()
            if len(self._streams) > _MOST_STREAMS:
                del self._streams[next(iter(self._streams))]
        if index.opened is not None:
            stream.add(index.opened)
        self._data, self._token = data, index.token
        self._changed.set()
        self._changed = asyncio.Event()

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = str((writer.get_extra_info("peername") or ("?",))[0])
        self._callers += 1
        reading: asyncio.Task[None] | None = None
        try:
            if self._callers > _MOST_CALLERS:
                return
            opener, closer = await asyncio.wait_for(self._greet(reader, writer, caller), _HELLO_SECONDS)
            requests: asyncio.Queue[tuple[float, dict[str, Any] | None]] = asyncio.Queue(2 * _WINDOW)
            reading = asyncio.ensure_future(self._read(reader, opener, requests))
            while True:
                arrived, request = await requests.get()
                if request is None:
                    return
                try:
                    body, status = await self._answer(arrived, request), _DONE
                except (DtcommError, OSError, ValueError, TypeError, LookupError) as error:
                    body, status = str(error).encode(), _FAILED
                await self._pace(arrived, len(body))
                writer.write(closer.head(status, body) + status)
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
    ) -> tuple[Seal, Seal]:
        own = nonce()
        writer.write(_MAGIC + own)
        hello = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
        its, proof = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
        if not is_proof(proof, self._secret, _CLIENT, own, its):
            warn_of_caller(caller, f"refused a subscriber from {caller}: {WRONG_SECRET}")
            raise ConnectionError
        writer.write(prove(self._secret, _SERVER, own, its))
        key = prove(self._secret, own, its)
        return Seal(key, _CLIENT), Seal(key, _SERVER)

    async def _read(self, reader: asyncio.StreamReader, opener: Seal, requests: Any) -> None:
        """Queue requests with the time of their arrival, and None when no more come."""
        try:
            while True:
                length, proof = HEAD.unpack(await reader.readexactly(HEAD.size))
                request = opener.open(proof, await reader.readexactly(min(length, _MOST_REQUEST)))
                await requests.put((time.monotonic(), request))
        except (OSError, EOFError, ValueError, RecursionError):
            await requests.put((0.0, None))

    async def _answer(self, arrived: float, request: dict[str, Any]) -> bytes | bytearray:
        if "get" in request:
            name, offset, size = request["get"], request["offset"], request["size"]
            if not NAME.fullmatch(name) or not (0 <= offset and 0 <= size <= _PIECE):
                raise ValueError("no valid request")
            return bytearray(self._store.get(name, offset, size))
        token, number, deadline = request["index"], request.get("next"), arrived + float(request["wait"])
        while True:
            stream = self._streams.get(token, _Stream(sealed=True))
            if number is not None and 0 <= number < len(stream.pieces):
                name, offset, size, whole = stream.pieces[number]
                head = json.dumps([name, offset, whole]).encode() + b"\n"
                return head + bytes(self._store.get(name, offset, size))
            if stream.sealed or time.monotonic() >= deadline:
                return self._data if number is None else b""
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())

    async def _pace(self, arrived: float, size: int) -> None:
        """With DTCOMM_EMULATE_LINK, wait as long as such a link would take."""
        if self._link is None:
            return
        latency = self._link.latency_s
        begin = max(arrived + 2 * latency, time.monotonic() + latency, self._free_at)
        self._free_at = begin + size * self._link.ns_per_byte * 1e-9
        if (left := self._free_at - time.monotonic()) > 0:
            await asyncio.sleep(left)


class _Connection:
    """One connection to a server."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._socket = socket.create_connection(parse_address(address, "address"), timeout=timeout_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello, own = self._receive(len(_MAGIC) + NONCE_BYTES), nonce()
            its = bytes(hello[len(_MAGIC) :])
            if hello[: len(_MAGIC)] != _MAGIC:
                raise ConnectionError(f"{address} is no server of weights of this version of dtcomm")
            self._socket.sendall(own + prove(secret(), _CLIENT, its, own))
            if not is_proof(bytes(self._receive(PROOF_BYTES)), secret(), _SERVER, its, own):
                raise PermissionError(WRONG_SECRET)
        except BaseException:
            self._socket.close()
            raise
        key = prove(secret(), its, own)
        self._closer, self._opener = Seal(key, _CLIENT), Seal(key, _SERVER)

    def ask(self, request: dict[str, Any]) -> None:
        self._socket.sendall(self._closer.close(request))

    def answer(self) -> memoryview:
        """Receive an answer; MissingFile if the server could not give it."""
        length, proof = HEAD.unpack(self._receive(HEAD.size))
        if not 1 <= length <= _MOST_ANSWER:
            raise ConnectionError(f"an answer of {length} bytes")
        body = memoryview(self._receive(length))
        self._opener.check(proof, body[:1], body[1:])
        if body[:1] != _DONE:
            raise MissingFile(printable(bytes(body[1:]).decode(errors="replace")))
        return body[1:]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends a call that waits for it
        self._socket.close()

    def _receive(self, size: int) -> bytearray:
        out, at = bytearray(size), 0
        while at < size:
            received = self._socket.recv_into(memoryview(out)[at:])
            if not received:
                raise ConnectionError("the connection has ended")
            at += received
        return out


class _Job:
    """Requests that connections share, and the files that their answers make.

    Args:
        todo: The requests of each connection.
        window: How many of them a connection may make before they are answered.
        sizes: The files that are asked for, and their bytes; None: answers name them, and the last ones are empty.
    """

    def __init__(
        self, todo: Sequence[Iterator[Any]], window: int, sizes: dict[str, int] | None = None
    ) -> None:
        self._todo, self.window, self._sizes = todo, window, sizes
        self.again: deque[dict[str, Any]] = deque()  # what ended connections did not answer
        self.done: queue.SimpleQueue[Any] = (
            queue.SimpleQueue()
        )  # files, errors, and None of each thread that ends
        self.progress, self.ended, self.cancelled = time.monotonic(), False, False
        self._left = sum(sizes.values()) if sizes else 0
        self._files: dict[str, tuple[bytearray, list[int]]] = {}  # and the bytes that are missing
        self._lock = threading.Lock()

    def take(self, number: int) -> dict[str, Any] | None:
        """Return the next request of a connection; None if there is none now."""
        with self._lock:
            if self.ended:
                return None
            return self.again.popleft() if self.again else next(self._todo[number], None)

    def receive(self, request: dict[str, Any], body: memoryview) -> int:
        """Take an answer, and return how many bytes of a file it has."""
        if self._sizes is None:
            if not body:
                self.ended = True
                return 0
            end = bytes(body[:512]).index(b"\n")
            name, offset, whole = json.loads(bytes(body[:end]))
            body = body[end + 1 :]
        else:
            name, offset, whole = request["get"], request["offset"], self._sizes[request["get"]]
            if len(body) != request["size"]:
                raise MissingFile(f"{len(body)} bytes of {name}, where the index says {request['size']}")
        with self._lock:
            self.progress = time.monotonic()
            data, missing = self._files.setdefault(name, (bytearray(whole), [whole]))
            data[offset : offset + len(body)] = body
            missing[0] -= len(body)
            self._left -= len(body)
            self.ended = self.ended or (self._sizes is not None and self._left == 0)
            # The last pieces are for the connections that are the first to be free.
            self.window = max(2, min(self.window, self._left // len(body))) if self._sizes else self.window
            if missing[0] == 0:
                self.done.put((name, data))
                del self._files[name]
        return len(body)


class RemoteStore(Store):
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
        self._connections: list[_Connection | None] = [None] * (connections + 1)  # the first is for the index
        self._locks = [threading.Lock() for _ in self._connections]
        self.on_progress: Callable[[int], None] = lambda size: None
        self._closed = False

    def index(self) -> bytes:
        begun = time.monotonic()
        return self._index("", 0.0, lambda: begun)

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytearray:
        return next(self.fetch([(name, offset + size)]))[1][offset:]

    def fetch(self, files: Iterable[tuple[str, int]]) -> Files:
        sizes, most = dict(files), len(self._connections) - 1
        # Small files are cut so that each connection carries a part of them.
        step = max(_LEAST_PIECE, min(_PIECE, sum(sizes.values()) // (4 * most) + 1))
        pieces = [
            (name, at, min(step, size - at)) for name, size in sizes.items() for at in range(0, size, step)
        ]
        count = min(most, len(pieces))
        todo = ({"get": name, "offset": at, "size": size} for name, at, size in pieces)
        return self._carry(_Job([todo] * count, min(_WINDOW, -(-len(pieces) // max(1, count))), sizes), count)

    def follow(self, seen: Index, wait_s: float) -> Files:
        count = len(self._connections) - 1
        wait_s = max(0.0, min(wait_s, _LONGEST_WAIT, self._timeout_s / 2))
        request = {"index": seen.token, "wait": wait_s}
        job = _Job(
            [({**request, "next": n} for n in itertools.count(k, count)) for k in range(count)], _WINDOW
        )
        result: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def watch() -> None:
            try:
                result.put(self._index(seen.token, wait_s, lambda: -math.inf if job.cancelled else begun))
            except BaseException as error:
                result.put(error)

        begun = time.monotonic()
        # The index comes on a connection of its own, so that it does not wait for pieces.
        threading.Thread(target=watch, daemon=True).start()
        yield from self._carry(job, count)
        data = result.get()
        if isinstance(data, BaseException):
            raise data
        if Index.read(data).releases != seen.releases:
            yield INDEX, bytearray(data)

    def close(self) -> None:
        self._closed = True
        for connection in self._connections:
            if connection is not None:
                connection.close()

    def _index(self, token: str, wait_s: float, progress: Callable[[], float]) -> bytes:
        def call(connection: _Connection) -> bytes:
            connection.ask({"index": token, "wait": wait_s})
            return bytes(connection.answer())

        return bytes(self._retried(0, progress, call))

    def _carry(self, job: _Job, count: int) -> Files:
        """Yield the files of a job as they are complete, while a thread for each connection receives them."""

        def work(number: int) -> None:
            try:
                while not job.ended:
                    self._retried(number + 1, lambda: job.progress, lambda c: self._exchange(c, number, job))
                    if not job.ended:
                        time.sleep(0.005)  # another connection may end, and leave its requests
            except BaseException as error:
                job.done.put(error)
            job.done.put(None)

        for number in range(count):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        running = count
        try:
            while running:
                item = job.done.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            if running:  # an error, or the caller wants no more: what connections still bring is not wanted
                job.ended = job.cancelled = True
                job.progress = -math.inf
                for connection in self._connections:
                    if connection is not None:
                        connection.close()

    def _exchange(self, connection: _Connection, number: int, job: _Job) -> None:
        """Make requests and take answers until there are none; those without an answer go back if it ends."""
        asked: deque[dict[str, Any]] = deque()
        try:
            while True:
                while len(asked) < job.window and (request := job.take(number)) is not None:
                    asked.append(request)
                    connection.ask(request)
                if not asked:
                    return
                size = job.receive(asked[0], connection.answer())
                asked.popleft()
                self.on_progress(size)
        finally:
            job.again.extend(asked)

    def _retried(self, number: int, progress: Callable[[], float], call: Callable[[_Connection], Any]) -> Any:
        """Call with a connection, which is made again where it has ended, while there is progress."""
        with self._locks[number]:
            while True:
                try:
                    connection = self._connections[number]
                    if connection is None:
                        connection = _Connection(self.address, max(0.1, self._timeout_s))
                        self._connections[number] = connection
                    return call(connection)
                except OSError as error:
                    if (broken := self._connections[number]) is not None:
                        broken.close()
                    self._connections[number] = None
                    is_last = time.monotonic() + _RETRY_SECONDS >= progress() + self._timeout_s
                    if self._closed or isinstance(error, PermissionError) or is_last:
                        raise PeerLost(f"the weights at {self.address} cannot be read: {error}") from None
                    time.sleep(_RETRY_SECONDS)
