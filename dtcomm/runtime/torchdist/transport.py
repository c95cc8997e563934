"""Transports: how the executor over a torch.distributed group moves the bytes of a round.

:class:`NcclTransport` queues collectives and messages on streams. :class:`GlooTransport` sends point-to-point messages
that the host waits for, from and to a device through host memory, and finds the rank that caused a failure.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtcomm import _C, torch_compat
from dtcomm.errors import DtcommError, PayloadCorrupt
from dtcomm.runtime.bootstrap.rendezvous import disagreement
from dtcomm.runtime.flight_recorder import FlightEntry
from dtcomm.runtime.torchdist.faults import FaultAttribution, connection_error
from dtcomm.streams import Streams

CHECKSUM = struct.Struct("<I")  # CRC32C
# The message that DTCOMM_CHECK=1 sends before an operation: its text, padded with zeros, and a digest.
HEADER_BYTES, TEXT_BYTES, HEADER_TAG = 512, 504, 0


class P2PMessage(NamedTuple):
    """One point-to-point message: its bytes, the other rank and, for backends that match by tag, its tag."""

    payload: torch.Tensor
    peer: int
    tag: int


class Transport:
    """Moves bytes in rounds. ``start`` methods queue after the current stream's work and do not wait for it.

    A payload stays as it is, and is kept alive, until its handle has been waited for.

    Attributes:
        name: The backend's name.
        blocks_host: Whether ``wait`` blocks the host until the bytes have arrived; otherwise it makes the current
            stream wait.
        entry: The flight-recorder entry of the operation that is running, to note which ranks it waits for.
    """

    name: str
    blocks_host = False
    entry: FlightEntry | None = None

    def all_to_all(
        self,
        output: torch.Tensor,
        output_sizes: Sequence[int],
        input: torch.Tensor,
        input_sizes: Sequence[int],
    ) -> Any:
        """Start an all-to-all of bytes; sizes are in bytes, by rank. Only if the host is not blocked."""
        raise NotImplementedError

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Any:
        """Start an all-gather; ``input`` may be a part of ``output``. Only if the host is not blocked."""
        raise NotImplementedError

    def send_recv(
        self, sends: Sequence[P2PMessage], receives: Sequence[P2PMessage], checksum: bool, context: str
    ) -> Any:
        """Start messages to and from some ranks; two ranks list what is between them in the same order.

        With ``checksum`` every payload is sent with its CRC32C. ``context`` is for error messages.
        """
        raise NotImplementedError

    def wait(self, handle: Any) -> None:
        """Wait for what was started; see ``blocks_host``."""
        raise NotImplementedError

    def progress(self) -> int:
        """A number that changes whenever a wait ends."""
        return 0

    def lost_peer(self) -> DtcommError | None:
        """The error of the rank that is waited for, if it is known that it will not come; called by any thread."""
        return None

    def interrupt(self) -> DtcommError:
        """Tell the other ranks that a wait of this one was interrupted; the error of what waits here."""
        raise NotImplementedError

    def describe(self, device: torch.device) -> str:
        """How bytes move, for reports."""
        raise NotImplementedError

    def set_timeout(self, seconds: float) -> None:
        """Set how long later waits last, if the transport waits at all."""

    def close(self) -> None:
        """Leave the group; does nothing the second time."""


class NcclTransport(Transport):
    """Collectives and messages of a private NCCL backend, queued on its own stream. Tests use Gloo on CPU tensors."""

    def __init__(self, backend: Any, name: str, device: torch.device) -> None:
        self._backend = backend
        self.name = name
        # As one launch, in which messages do not wait for each other.
        self._coalesce = device.type != "cpu"

    def all_to_all(
        self,
        output: torch.Tensor,
        output_sizes: Sequence[int],
        input: torch.Tensor,
        input_sizes: Sequence[int],
    ) -> list[Any]:
        options = _on_own_stream(torch_compat.c10d_options.AllToAllOptions())
        return [self._backend.alltoall_base(output, input, list(output_sizes), list(input_sizes), options)]

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> list[Any]:
        options = _on_own_stream(torch_compat.c10d_options.AllgatherOptions())
        return [self._backend._allgather_base(output, input, options)]

    def send_recv(
        self, sends: Sequence[P2PMessage], receives: Sequence[P2PMessage], checksum: bool, context: str
    ) -> list[Any]:
        if self._coalesce:
            self._backend._start_coalescing()
        works = [self._backend.recv([message.payload], message.peer, message.tag) for message in receives]
        works += [self._backend.send([message.payload], message.peer, message.tag) for message in sends]
        return [self._backend._end_coalescing()] if self._coalesce else works

    def wait(self, handle: list[Any]) -> None:
        for work in handle:
            work.wait()  # without a timeout: with one, NCCL would block the host

    def describe(self, device: torch.device) -> str:
        return f"{self.name}, queued on streams of {device}"

    def close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            (getattr(backend, "shutdown", None) or backend._shutdown)()


class GroupTransport(Transport):
    """Public calls of torch.distributed on the caller's group, for engines that are not torch's own.

    Args:
        group: The group. Its other work must be issued in the same order on all ranks.
        name: The name of its backend.
        ranks: The global ranks that take part, in order: all of the group, or two.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, ranks: Sequence[int]) -> None:
        self._group, self.name, self._ranks = group, name, list(ranks)
        self._own = self._ranks.index(dist.get_rank())
        self._all = len(self._ranks) == dist.get_world_size(group)

    def all_to_all(
        self,
        output: torch.Tensor,
        output_sizes: Sequence[int],
        input: torch.Tensor,
        input_sizes: Sequence[int],
    ) -> list[Any]:
        sizes = list(output_sizes), list(input_sizes)
        if self._all:
            return [dist.all_to_all_single(output, input, *sizes, group=self._group, async_op=True)]
        received, sent = torch.split(output, sizes[0]), torch.split(input, sizes[1])
        received[self._own].copy_(sent[self._own])
        return self._messages(enumerate(received), enumerate(sent))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> list[Any]:
        if self._all:
            return [dist.all_gather_into_tensor(output, input, group=self._group, async_op=True)]
        places = torch.split(output, input.numel())
        if places[self._own].data_ptr() != input.data_ptr():
            places[self._own].copy_(input)
        return self._messages(enumerate(places), enumerate([input] * len(places)))

    def send_recv(
        self, sends: Sequence[P2PMessage], receives: Sequence[P2PMessage], checksum: bool, context: str
    ) -> list[Any]:
        return self._messages(
            [(message.peer, message.payload) for message in receives],
            [(message.peer, message.payload) for message in sends],
        )

    def _messages(
        self, receives: Iterable[tuple[int, torch.Tensor]], sends: Iterable[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        operations = [
            dist.P2POp(operation, payload, self._ranks[peer], self._group)
            for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, payload in messages
            if peer != self._own and payload.numel()
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def wait(self, handle: list[Any]) -> None:
        for work in handle:
            work.wait()

    def describe(self, device: torch.device) -> str:
        return (
            f"the group's own {self.name}, an engine that dtcomm does not know, queued on streams of {device}"
        )


def _on_own_stream(options: Any) -> Any:
    # Otherwise some versions of torch run the collective on the caller's stream, where nothing overlaps it.
    options.asyncOp = True
    return options


class _Started(NamedTuple):
    """A message under way: the backend's handle, and for a receive the payload and the host buffer that it fills."""

    work: Any
    peer: int
    payload: torch.Tensor | None
    buffer: torch.Tensor
    checksum: bool
    context: str


class GlooTransport(Transport):
    """Point-to-point messages of a private Gloo group, or of any backend that matches messages by tag.

    Tensors of a device go through host memory: before a send the host waits for the payload alone, and what arrives is
    copied in the stream's order. Torch's allocator of pinned memory keeps a buffer until the copies are done.

    ``store`` is where ranks record whom they gave up on; None: the group's own store. ``streams`` are those of the
    tensors' device; None: CPU tensors. ``has_ended`` says whether the process of a rank is known to have ended.
    """

    name = "gloo"
    blocks_host = True

    def __init__(
        self,
        group: Any,
        names: Sequence[str],
        timeout_s: float,
        store: Any = None,
        streams: Streams | None = None,
        has_ended: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.rank: int = group.rank()
        self._group: Any = group
        _transports.add(self)
        self._names = list(names)
        self._timeout = timedelta(seconds=timeout_s)
        self._attribution = FaultAttribution(group, self._names, timeout_s, store)
        self._streams = streams
        self._has_ended = has_ended
        self._waiting: _Started | None = None
        self._waits = 0

    def send_recv(
        self, sends: Sequence[P2PMessage], receives: Sequence[P2PMessage], checksum: bool, context: str
    ) -> list[_Started]:
        started = []
        for message in receives:
            buffer = self._receive_buffer(message.payload, checksum)
            work = self._start("recv", buffer, message)
            payload = None if buffer is message.payload else message.payload
            started.append(_Started(work, message.peer, payload, buffer, checksum, f"receiving {context}"))
        for message, buffer in zip(sends, self._send_buffers(sends, checksum), strict=True):
            work = self._start("send", buffer, message)
            started.append(_Started(work, message.peer, None, buffer, False, f"sending {context}"))
        return started

    def wait(self, handle: Sequence[_Started]) -> None:
        for message in handle:
            self._note_waiting(message.peer)
            self._waiting = message
            try:
                message.work.wait(self._timeout)
            except RuntimeError as error:
                cause = connection_error(self._group, message.peer, error)
                raise self._attribution.error(message.peer, cause, message.context) from error
            finally:
                self._waiting = None
                self._waits += 1
            if message.payload is not None:
                self._unpack(message, message.payload)

    def progress(self) -> int:
        return self._waits

    def lost_peer(self) -> DtcommError | None:
        message = self._waiting
        if message is None:
            return None
        if self._has_ended(message.peer):
            cause = RuntimeError("its process has ended")
        elif self._attribution.gave_up(message.peer):
            cause = RuntimeError("it has given up")
        else:
            return self._attribution.interruption()
        return self._attribution.error(message.peer, cause, message.context)

    def interrupt(self) -> DtcommError:
        return self._attribution.interrupt()

    def require_same_operation(self, text: str, value: object) -> None:
        """Compare what the ranks are about to do, for DTCOMM_CHECK=1; all raise CollectiveMismatch if they differ.

        What is compared is the ``repr`` of ``value``. ``text`` is for the error; truncated if it is long.
        """
        digest = hashlib.blake2b(repr(value).encode(), digest_size=HEADER_BYTES - TEXT_BYTES).digest()
        header = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0") + digest
        own = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        headers = {
            rank: own if rank == self.rank else torch.empty_like(own) for rank in range(len(self._names))
        }
        peers = [rank for rank in headers if rank != self.rank]
        receives = [P2PMessage(headers[peer], peer, HEADER_TAG) for peer in peers]
        sends = [P2PMessage(own, peer, HEADER_TAG) for peer in peers]
        self.wait(self.send_recv(sends, receives, False, f"the check of {text}"))
        contents = [bytes(header.tolist()) for header in headers.values()]
        if len(set(contents)) > 1:
            texts = [content[:TEXT_BYTES].rstrip(b"\0").decode(errors="replace") for content in contents]
            raise disagreement("what they do", dict(zip(self._names, texts, strict=True)))

    def describe(self, device: torch.device) -> str:
        staged = "" if self._streams is None else f", through the host's memory from and to {device}"
        return f"messages of the group's backend{staged}"

    def set_timeout(self, seconds: float) -> None:
        self._timeout = timedelta(seconds=seconds)
        self._attribution.set_timeout(seconds)

    def close(self) -> None:
        # Dropping the group closes its connections, which wakes the ranks that wait for this one.
        group, self._group = self._group, None
        if group is not None and group in torch_compat.all_groups():
            dist.destroy_process_group(group)

    def _receive_buffer(self, payload: torch.Tensor, checksum: bool) -> torch.Tensor:
        if checksum:
            return torch.empty(payload.numel() + CHECKSUM.size, dtype=torch.uint8)
        return payload if self._streams is None else self._streams.staging(payload.numel())

    def _send_buffers(self, sends: Sequence[P2PMessage], checksum: bool) -> list[torch.Tensor]:
        buffers = [message.payload for message in sends]
        if self._streams is not None and buffers:
            streams = self._streams
            buffers = [
                streams.staging(payload.numel()).copy_(payload, non_blocking=True) for payload in buffers
            ]
            streams.synchronize(streams.record())
        return [_with_checksum(buffer) for buffer in buffers] if checksum else buffers

    def _unpack(self, message: _Started, payload: torch.Tensor) -> None:
        size = payload.numel()
        if message.checksum:
            (sent,) = CHECKSUM.unpack(message.buffer[size:].numpy().tobytes())
            arrived = _C.crc32c(message.buffer.data_ptr(), size)
            if sent != arrived:
                raise PayloadCorrupt(
                    f"what {self._names[message.peer]} sent to {self._names[self.rank]} arrived damaged, "
                    f"{message.context} (checksum {sent:08x} when sent, {arrived:08x} on arrival)"
                )
        payload.copy_(message.buffer[:size], non_blocking=not message.checksum)

    def _start(self, verb: str, buffer: torch.Tensor, message: P2PMessage) -> Any:
        try:
            return getattr(self._group, verb)([buffer], message.peer, message.tag)
        except RuntimeError as error:  # the connection is known to be broken
            raise self._attribution.error(message.peer, error, f"before {verb}") from error

    def _note_waiting(self, peer: int) -> None:
        entry = self.entry
        if entry is not None and entry.waiting_for != peer:
            entry.waiting_for = peer
            if peer not in entry.waited_for:
                entry.waited_for.append(peer)


def _with_checksum(payload: torch.Tensor) -> torch.Tensor:
    size = payload.numel()
    framed = torch.empty(size + CHECKSUM.size, dtype=torch.uint8)
    framed[:size].copy_(payload)
    checksum = CHECKSUM.pack(_C.crc32c(payload.data_ptr(), size))
    framed[size:].copy_(torch.frombuffer(bytearray(checksum), dtype=torch.uint8))
    return framed


_transports: weakref.WeakSet[GlooTransport] = weakref.WeakSet()


def _after_fork() -> None:
    # Gloo's destructors wait for threads, which a child does not have: a child that exits would hang or crash in them.
    for transport in _transports:
        for kept in (transport, transport._group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_after_fork)
