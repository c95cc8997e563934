"""One-sided reads and writes of tensors over TCP, as a transport of torch: ``torch.distributed._transport``.

torch 2.15.0 was read; it finds the transport by the entry point ``dtcomm`` of ``torch.distributed.transports``. Memory
is on the CPU. Several connections share a transfer. Both ends prove that they know DTCOMM_SECRET; nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dtcomm import torch_compat
from dtcomm.errors import CollectiveTimeout, DtcommError, PeerLost
from dtcomm.extensions.weights.slices import bytes_of
from dtcomm.runtime.bootstrap import tcp
from dtcomm.streams import HostStreams
from dtcomm.work import QueuedWork, TorchWork

_REQUEST = struct.Struct("<B8sQQ")  # read or write, the key of memory, first byte, bytes
_ANSWER = struct.Struct("<BQ")  # whether it failed, bytes that follow
_READ, _WRITE = 1, 2
_PIECE, _POLL_SECONDS = 4 << 20, 0.1


def tcp_transport(
    device: torch.device | str | None = None, *, connections: int = 4, timeout: float = 30.0
) -> Any:
    """Make a transport; ``new_transport("dtcomm")`` of torch 2.15 calls it.

    Args:
        device: None or the CPU.
        connections: TCP connections to the peer.
        timeout: Seconds that a call waits, and that a connection may make no progress.

    Returns:
        A ``Transport`` of torch.

    Raises:
        ModuleNotFoundError: torch is older than 2.15.
        ValueError: ``device`` is another one, or ``connections`` is less than 1.

    Example:
        >>> from torch.distributed._transport import new_transport  # doctest: +SKIP
        >>> transport = new_transport("dtcomm", connections=8)  # doctest: +SKIP
    """
    return type("TcpTransport", (_Endpoint, torch_compat.transport_base()), {})(device, connections, timeout)


@dataclass(frozen=True)
class RemoteBuffer:
    """What a peer must know to read and write memory of another endpoint.

    Attributes:
        endpoint: The token of the endpoint.
        key: What it knows the memory by.
        length: Bytes.
    """

    endpoint: int
    key: str
    length: int

    def serialize(self) -> bytes:
        """Return the bytes that the peer is given."""
        return json.dumps({"dtcomm": 1, **asdict(self)}).encode()

    @classmethod
    def deserialize(cls, data: bytes) -> RemoteBuffer:
        """Return what `serialize` gave the bytes of; ValueError if they are not valid."""
        try:
            fields = json.loads(data)
            if fields.pop("dtcomm") == 1 and all(
                type(fields[each]) is int for each in ("endpoint", "length")
            ):
                if len(bytes.fromhex(fields["key"])) == 8 and fields["length"] >= 0:
                    return cls(**fields)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            pass
        raise ValueError("data: it describes no memory of this transport")


class _View:
    def __init__(self, memory: _Memory, offset: int | None, length: int | None) -> None:
        begin, whole = offset or 0, len(memory.data)
        end = whole if length is None else begin + length
        if not 0 <= begin <= end <= whole or not memory.active:
            raise ValueError(
                f"offset={offset}, length={length}: not inside {whole} bytes of registered memory"
            )
        self.memory, self.data = memory, memory.data[begin:end]

    def size(self) -> int:
        return len(self.data)


class _MutableView(_View):
    writable: Literal[True] = True


class _Memory:
    """A registered tensor."""

    def __init__(self, tensor: Tensor, endpoint: int) -> None:
        self.tensor, self.active, self.key = tensor, True, secrets.token_bytes(8)
        self.data = bytes_of(tensor).numpy().data
        self._endpoint = endpoint

    def to_view(self, offset: int | None = None, length: int | None = None) -> _View:
        return _View(self, offset, length)

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> _MutableView:
        return _MutableView(self, offset, length)

    def to_remote_buffer(self, *, timeout: float | None = None) -> RemoteBuffer:
        return RemoteBuffer(self._endpoint, self.key.hex(), _View(self, None, None).size())


class _Endpoint:
    """The methods of torch's ``Transport``."""

    def __init__(self, device: torch.device | str | None, connections: int, timeout: float) -> None:
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(f"device={device}: expected the CPU; copy tensors of a device to it")
        if connections < 1:
            raise ValueError(f"connections={connections}: expected 1 or more")
        super().__init__(device)  # type: ignore[call-arg]
        self._count, self._default_timeout = connections, timeout
        self._memory: dict[bytes, _Memory] = {}  # by key
        self._pending: dict[QueuedWork, tuple[_View, list[Future[None]]]] = {}
        self._listener = tcp.Listener()
        self._peer: int | None = None  # its token
        self._idle: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._sockets: set[socket.socket] = set()
        self._pool = ThreadPoolExecutor(connections, "dtcomm-transport")
        self._lock, self._is_closing = threading.Lock(), False
        threading.Thread(target=self._accept, name="dtcomm-transport", daemon=True).start()

    @staticmethod
    def supported() -> bool:
        return True

    def bind(self, *, timeout: float | None = None) -> bytes:
        self._require_open()
        return json.dumps(self._listener.info()).encode()

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        self._require_open()
        if self._peer is not None:
            raise RuntimeError("the transport is connected already")
        peer = json.loads(peer_url)
        limit = self._default_timeout if timeout is None else timeout
        made = self._listener.connect(
            1, {0: peer}, ["the peer", "this end"], limit, connections={0: self._count}
        )
        for connection in (socket.socket(fileno=descriptor) for descriptor in made[0]):
            connection.settimeout(self._default_timeout)
            self._sockets.add(connection)
            self._idle.put(connection)
        self._peer = peer["token"]
        return 0

    def connected(self) -> bool:
        return self._peer is not None and not self._is_closing

    def register_memory(self, tensor: Tensor, *, timeout: float | None = None) -> _Memory:
        self._require_open()
        if not tensor.is_cpu or not tensor.is_contiguous() or not tensor.numel():
            raise ValueError("tensor: expected a contiguous tensor on the CPU, of one element or more")
        for memory in self._memory.values():
            if (memory.tensor.data_ptr(), len(memory.data)) == (tensor.data_ptr(), tensor.nbytes):
                return memory
        memory = _Memory(tensor.detach(), self._listener.token)
        self._memory[memory.key] = memory
        return memory

    def unregister_memory(self, memory: Any, *, timeout: float | None = None) -> None:
        self._require_open()
        if any(view.memory is memory for view, _ in list(self._pending.values())):
            raise RuntimeError("memory: it has transfers that go on; wait for them first")
        memory.active = False
        self._memory.pop(memory.key, None)

    def write(
        self, local_buffer: Any, remote_buffer: Any, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        return self._start(_WRITE, local_buffer, remote_buffer, async_op, timeout)

    def read(
        self, local_buffer: Any, remote_buffer: Any, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        if not isinstance(local_buffer, _MutableView):
            raise TypeError("local_buffer: expected a view of to_mutable_view()")
        return self._start(_READ, local_buffer, remote_buffer, async_op, timeout)

    def close(self, *, timeout: float | None = None) -> None:
        self._is_closing = True
        limit = time.monotonic() + (self._default_timeout if timeout is None else timeout)
        while self._pending:
            if time.monotonic() >= limit:
                raise CollectiveTimeout(
                    "transfers go on; close the transport again before you use their memory"
                )
            time.sleep(0.001)
        self._pool.shutdown(wait=False)
        self._drop()
        self._memory.clear()

    def _start(
        self, kind: int, view: _View, remote: RemoteBuffer, async_op: bool, timeout: float | None
    ) -> Any:
        self._require_open()
        if not isinstance(view, _View) or self._memory.get(view.memory.key) is not view.memory:
            raise TypeError("local_buffer: expected a view of memory that this transport has registered")
        if not isinstance(remote, RemoteBuffer) or remote.endpoint != self._peer:
            raise ValueError(
                "remote_buffer: expected memory of the peer to which this transport is connected"
            )
        if view.size() > remote.length:
            raise ValueError(f"local_buffer: {view.size()} bytes; remote_buffer has {remote.length}")
        queued, key = QueuedWork((), HostStreams(), detached=True), bytes.fromhex(remote.key)
        pieces = [view.data[at : at + _PIECE] for at in range(0, view.size(), _PIECE)] or [view.data]
        moved = [
            self._pool.submit(self._move, kind, key, number * _PIECE, piece)
            for number, piece in enumerate(pieces)
        ]
        self._pending[queued] = view, moved
        for piece in moved:
            piece.add_done_callback(lambda _: self._end(queued))
        work = TorchWork(queued, (), self._default_timeout if timeout is None else timeout)
        return work if async_op else int(not work.wait())

    def _end(self, work: QueuedWork) -> None:
        """End a transfer when its last piece has moved."""
        with self._lock:
            _, pieces = self._pending.get(work, (None, []))
            if not pieces or not all(piece.done() for piece in pieces):
                return
            del self._pending[work]
        errors = [error for piece in pieces if (error := piece.exception()) is not None]
        work.fail(errors[0]) if errors else work.complete()

    def _move(self, kind: int, key: bytes, at: int, data: memoryview) -> None:
        """Read or write one piece; there are as many threads as connections."""
        if (connection := self._take()) is None:
            raise PeerLost("the peer of the transport was lost")
        try:
            connection.sendall(_REQUEST.pack(kind, key, at, len(data)))
            if kind == _WRITE:
                connection.sendall(data)
            failed, length = _ANSWER.unpack(_receive(connection, memoryview(bytearray(_ANSWER.size))))
            body = data if kind == _READ and not failed else memoryview(bytearray(min(length, _PIECE)))
            _receive(connection, body)
        except OSError as error:
            connection.close()
            self._drop()
            raise PeerLost(f"the peer of the transport cannot be reached: {error}") from None
        self._idle.put(connection)
        if failed:
            raise DtcommError(f"the peer refused a transfer: {bytes(body).decode(errors='replace')}")

    def _accept(self) -> None:
        """Serve callers that prove that they know the secret, each in a thread."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closing:
                if selector.select(_POLL_SECONDS) and (caller := self._listener.accept()) is not None:
                    threading.Thread(target=self._serve, args=(caller,), daemon=True).start()
        self._listener.close()

    def _serve(self, caller: tcp.Caller) -> None:
        connection = caller.connection
        with self._lock:
            self._sockets.add(connection)
        with contextlib.suppress(OSError), connection, selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while time.monotonic() < caller.until and not (selector.select(_POLL_SECONDS) and caller.read()):
                pass
            if self._listener.hello_of(caller) is not None and tcp.answer(caller):
                tcp.configure(connection, True)
                connection.setblocking(True)
                while not self._is_closing:
                    self._answer(connection)
        with self._lock:
            self._sockets.discard(connection)

    def _answer(self, connection: socket.socket) -> None:
        request = _receive(connection, memoryview(bytearray(_REQUEST.size)))
        kind, key, at, length = _REQUEST.unpack(request)
        memory, error = self._memory.get(key), b""
        if memory is None or kind not in (_READ, _WRITE) or at + length > len(memory.data):
            error, memory = b"no such memory is registered, or it is smaller", None
        data = memory.data[at : at + length] if memory else memoryview(bytearray(min(length, _PIECE)))
        if kind == _WRITE:
            _receive(connection, data)
        body = error if error or kind == _WRITE else data
        connection.sendall(_ANSWER.pack(bool(error), len(body)))
        connection.sendall(body)

    def _take(self) -> socket.socket | None:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        return None

    def _drop(self) -> None:
        """End all connections; threads that wait at one close it."""
        self._is_closing = True
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._sockets.clear()
        while (idle := self._take()) is not None:
            idle.close()

    def _require_open(self) -> None:
        if self._is_closing:
            raise RuntimeError("the transport is closed, or its peer was lost")


def _receive(connection: socket.socket, out: memoryview) -> memoryview:
    at = 0
    while at < len(out):
        if not (received := connection.recv_into(out[at:])):
            raise ConnectionError("the connection has ended")
        at += received
    return out
