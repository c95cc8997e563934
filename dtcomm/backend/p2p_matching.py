"""send and recv with torch's semantics: messages are matched by source and tag, from any source, in any order.

The engine delivers the messages between two ranks in order, and both ranks must know their sizes. Every message is
therefore preceded by a header of fixed size (tag, size), which contains a short message itself. The receiver reads the
headers in order and gives each message to the first matching receive. A short message without a match is stored; a long
one stays at its sender until a receive asks for it or for a message behind it.

A thread that waits for the only receive takes the messages itself, a short one by one native call. Other receives are
started in the engine: when the group is used again, when a handle is asked for more than ``wait``, or within
milliseconds by a thread of the matcher.
"""

from __future__ import annotations

import struct
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.backend.process_group_base import COMPLETED_WORK, copy_to_tensors, flatten, shares_memory
from dtcomm.collectives.p2p import post
from dtcomm.errors import CollectiveMismatch, CommunicatorClosed, DtcommError
from dtcomm.runtime.communicator import Communicator, get_communicator_of_pair
from dtcomm.runtime.plans import receive_message, run_repeated, send_message
from dtcomm.runtime.process_groups import group_store
from dtcomm.streams import HostStreams
from dtcomm.work import COMPLETED, QueuedWork, TorchWork, Work, completion

HEADER_BYTES = 2048
_TAG_AND_SIZE = struct.Struct("<qq")
_MAX_INLINE_BYTES = HEADER_BYTES - _TAG_AND_SIZE.size
_POLL_S = 0.002  # pause between two looks for receives to start, and for ranks that have begun to send
_IDLE_POLLS = 250  # without a receive, after which the thread that looks ends
_HOST = HostStreams()
_PURPOSE = "backend"  # keeps these messages apart from those of dtcomm.send


class ReceiveWork(TorchWork):
    """The handle of one receive, complete when a matching message has arrived.

    It adds to `TorchWork` what the matcher needs, the rank of the sender, and a ``wait`` that processes messages on the
    waiting thread.

    Attributes:
        bytes: The memory of the tensor to fill, or that of a contiguous copy, as bytes.
        wanted_source: The sender's rank in the group; None accepts any.
        source: The rank in the group of the actual sender, -1 while it is unknown.
    """

    def __init__(
        self, matcher: MessageMatcher, tensor: torch.Tensor, wanted_source: int | None, tag: int
    ) -> None:
        dist.Work.__init__(self)
        self.outputs = [tensor]
        self.matcher = matcher
        self.tensor = tensor
        self.wanted_source = wanted_source
        self.source = -1 if wanted_source is None else wanted_source
        self.tag = tag
        self.posted = matcher.polls
        self.ended = False
        self._queued: QueuedWork | None = None
        self._flat: torch.Tensor | None = None

    @property
    def _work(self) -> Work:  # type: ignore[override]
        """What other methods than ``wait`` need. Most receives end without it."""
        if self.ended and self._queued is None:
            return COMPLETED
        with self.matcher.lock:
            if self._queued is None:
                # Only the engine's receive from a known rank tells that rank of an interrupt. It ends with the
                # matcher's lock held.
                interrupt = self.matcher.interrupted if self.wanted_source is None else None
                self._queued = QueuedWork([self.tensor], _HOST, detached=True, interrupt=interrupt)
                if self.ended:
                    self._queued.complete()
            self.matcher.start()
            return self._queued

    @property
    def bytes(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = flatten(self.tensor)
        return _as_bytes(self._flat)

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the receive, or fail it with ``error``; the matcher's lock must be held."""
        if self.ended:
            return
        if error is None and self._flat is not None and not shares_memory(self._flat, self.tensor):
            copy_to_tensors([self.tensor], self._flat)
        if error is None:
            self.ended = True
            if self._queued is not None:
                self._queued.complete()
            return
        if self._queued is None:
            self._queued = QueuedWork([self.tensor], _HOST, detached=True)
        self.ended = True
        # Several receives may fail with one error, and each raises its own.
        self._queued.fail(type(error)(*error.args))

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not timeout and not self.ended:
            self.matcher.progress_inline(self)
        return (self.ended and self._queued is None) or super().wait(timeout)

    def _description(self) -> str:
        source = "any rank"
        if self.wanted_source is not None:
            source = f"rank {self.matcher.ranks[self.wanted_source]}"
        return f"recv of {self.bytes.numel()} bytes from {source}, tag {self.tag},"

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank


class SendWork(TorchWork):
    """The handle of a message in progress. Its receiver may be sending, too, and wait for a receive of this rank."""

    def __init__(self, matcher: MessageMatcher, work: Work, tensor: torch.Tensor) -> None:
        super().__init__(work, [tensor])
        self.matcher = matcher

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.matcher.unstarted:
            self.matcher.start()
        return super().wait(timeout)


class PeerInbox:
    """The messages from one rank. All methods but `take` are called with the matcher's lock held.

    ``work`` is the engine's receive in progress, of a header or of the message that it announced; ``is_taken`` says
    that a waiting thread runs that receive. After ``error`` no more messages will arrive.
    """

    def __init__(self, matcher: MessageMatcher, peer: int) -> None:
        self.peer = peer
        self.work: Work | None = None
        self.is_taken = False
        self.error: BaseException | None = None
        self._matcher = matcher
        self._communicator: Communicator | None = None
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._header_buffer: Any = self._header.numpy()  # the same memory, for struct
        self._header_call = self._call(self._header)
        self._unmatched: list[tuple[int, torch.Tensor]] = []  # (tag, message) in order of arrival
        self._announced: tuple[int, int] | None = None  # (tag, size) of a long message not yet received
        self._target: ReceiveWork | None = None  # of the long message being received; None: it is stored
        self._message: torch.Tensor | None = None  # the memory of the long message being received

    def match_unmatched(self, receive: ReceiveWork) -> bool:
        """Complete a receive with a stored message; returns whether there was one."""
        for index, (tag, message) in enumerate(self._unmatched):
            if tag == receive.tag:
                del self._unmatched[index]
                self._deliver(receive, message)
                return True
        return False

    def add_message(self, tag: int, message: torch.Tensor) -> None:
        """Deliver a complete message, or store it until a receive matches it."""
        receive = self._matcher.match(self.peer, tag)
        if receive is None:
            self._unmatched.append((tag, message))
        else:
            self._deliver(receive, message)

    def progress(self) -> None:
        """Process what has arrived, and start the next receive while any receive may match this peer."""
        while self.error is None and not self.is_taken:
            if self.work is not None:
                if not self.work.is_completed():
                    return
                work, self.work = self.work, None
                try:
                    work.wait()
                except BaseException as error:
                    self.fail(error)
                    return
                self._process_arrival()
            elif self._announced is not None:
                if not self._matcher.has_receive_for(self.peer):
                    return
                self._start_receive(self._place_for_announced())
            elif self._matcher.has_receive_for(self.peer) and self.peer != self._matcher.rank:
                self._start_receive(self._header)
            else:
                return

    def fail(self, error: BaseException) -> None:
        """Fail all receives that wait for this peer; no more messages will arrive."""
        self.error = error
        if self._target is not None:
            self._target.finish(error)
        for receive in self._matcher.cancel_receives(self.peer):
            receive.finish(error)

    def begin_to_take(self) -> tuple[Any, ...]:
        """Return the receive that `take` runs: of a header, or of the message that one has announced."""
        call = self._header_call if self._announced is None else self._call(self._place_for_announced())
        self.is_taken = True
        return call

    def take(self, call: tuple[Any, ...], receive: ReceiveWork) -> None:
        """Wait for a message on the calling thread, which holds no lock, and process it."""
        has_come: Any = None
        failure: BaseException | None = None
        try:
            if call is self._header_call:
                has_come = receive_message(call, receive.tensor, receive.tag)
            else:
                has_come = run_repeated(call, False)
            if has_come is False:
                work = self._post(call)
                work.wait()
        except BaseException as error:
            failure = error
        with self._matcher.lock:
            self.is_taken = False
            if isinstance(failure, Exception):
                self.fail(failure)
            elif has_come:
                self._matcher.remove(receive)
                receive.finish()
            elif failure is None:
                self._process_arrival()
            # An exception of a signal's handler is raised here; the next receive gets the error of the engine.
            if receive.ended or failure is not None:
                self._matcher.start()  # the receives of other threads
        if failure is not None and not isinstance(failure, Exception):
            raise failure

    def _call(self, memory: torch.Tensor) -> tuple[Any, ...]:
        matcher = self._matcher
        return (matcher.group, memory, memory, "recv", matcher.ranks[self.peer], _PURPOSE)

    def _post(self, call: tuple[Any, ...]) -> Work:
        if self._communicator is None:
            peer = self._matcher.ranks[self.peer]
            self._communicator = get_communicator_of_pair(self._matcher.group, peer, "src", False, _PURPOSE)
        return post(self._communicator, False, call)

    def _start_receive(self, memory: torch.Tensor) -> None:
        try:
            self.work = self._post(self._call(memory))
            if not self.work.is_completed():
                self.work.call_when_done(lambda _: self._matcher.progress(self))
        except BaseException as error:
            self.fail(error)

    def _process_arrival(self) -> None:
        if self._message is not None:  # the long message has arrived
            assert self._announced is not None
            (tag, _), self._announced = self._announced, None
            message, self._message = self._message, None
            receive, self._target = self._target, None
            if receive is None:
                self.add_message(tag, message)
            elif message.data_ptr() == receive.bytes.data_ptr():
                receive.source = self.peer
                receive.finish()
            else:
                self._deliver(receive, message)
            return
        tag, size = _TAG_AND_SIZE.unpack_from(self._header_buffer)
        if size <= _MAX_INLINE_BYTES:
            begin = _TAG_AND_SIZE.size
            self.add_message(tag, self._header[begin : begin + size].clone())
        else:
            self._announced = (tag, size)

    def _place_for_announced(self) -> torch.Tensor:
        assert self._announced is not None
        tag, size = self._announced
        self._target = self._matcher.match(self.peer, tag)
        if self._target is not None and self._target.bytes.numel() == size:
            self._message = self._target.bytes
        else:
            self._message = torch.empty(size, dtype=torch.uint8)
        return self._message

    def _deliver(self, receive: ReceiveWork, message: torch.Tensor) -> None:
        receive.source = self.peer
        if message.numel() != receive.bytes.numel():
            ranks = self._matcher.ranks
            receive.finish(
                CollectiveMismatch(
                    f"rank {ranks[self.peer]} sends {message.numel()} bytes with tag {receive.tag}, "
                    f"rank {ranks[self._matcher.rank]} receives {receive.bytes.numel()}"
                )
            )
            return
        receive.bytes.copy_(message)
        receive.finish()


class MessageMatcher:
    """The sends and receives between the ranks of one process group.

    Attributes:
        unstarted: Whether a receive may not have been started in the engine.
        polls: How often the thread that starts receives has looked.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.lock = threading.RLock()
        self._send_locks = [threading.Lock() for _ in range(group.size())]
        self._announced_to: set[int] = set()  # ranks that know by the store that this rank has begun to send
        self._inboxes: dict[int, PeerInbox] = {}
        self._receives: list[ReceiveWork] = []  # unmatched ones, in the order in which they were posted
        # By receiver: the header to send, for `send_message`.
        self._headers: dict[int, tuple[Any, ...]] = {}
        self.unstarted = False
        self.polls = 0
        self._is_watching = False
        self._closed = False

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group."""
        return dist.get_process_group_ranks(self.group)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> dist.Work:
        """Start sending; the returned handle is complete when the tensor may be changed."""
        if dst in self._headers:
            with self._send_locks[dst]:
                work = send_message(self._headers[dst], tensor, tag)
                if work is None:
                    return COMPLETED_WORK
                if work is not False:  # the engine still reads the header
                    self._headers[dst] = self._new_header(dst)
                    return SendWork(self, work, tensor)
        if self.unstarted:  # the send may wait for the other rank
            self.start()
        message = _as_bytes(flatten(tensor))
        if dst == self.rank:
            with self.lock:
                self._inbox(dst).add_message(tag, message.clone())
            return TorchWork(COMPLETED, [tensor])
        size = message.numel()
        call = self._new_header(dst)
        header = call[1]
        _TAG_AND_SIZE.pack_into(header.numpy(), 0, tag, size)
        if 0 < size <= _MAX_INLINE_BYTES:
            header[_TAG_AND_SIZE.size : _TAG_AND_SIZE.size + size] = message
        communicator = get_communicator_of_pair(self.group, self.ranks[dst], "dst", True, _PURPOSE)
        with self._send_locks[dst]:  # no other message may come between a header and its message
            if dst not in self._announced_to:
                self._announced_to.add(dst)
                group_store(self.group).set(_first_send_key(self.rank, dst), "1")
            work = post(communicator, True, call)
            if size > _MAX_INLINE_BYTES:
                work = post(communicator, True, (call[0], message, message, *call[3:]))
            self._headers.setdefault(dst, self._new_header(dst))
        return SendWork(self, work, tensor)

    def _new_header(self, dst: int) -> tuple[Any, ...]:
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        return (self.group, header, header, "send", self.ranks[dst], _PURPOSE)

    def receive(self, tensor: torch.Tensor, src: int | None, tag: int) -> ReceiveWork:
        """Start receiving from one rank of the group, or from any (None)."""
        receive = ReceiveWork(self, tensor, src, tag)
        with self.lock:
            if self._closed:
                raise CommunicatorClosed("group: it has been destroyed")
            inboxes = list(self._inboxes.values()) if src is None else [self._inbox(src)]
            for inbox in inboxes:
                if inbox.error is not None and (src is not None or len(self.ranks) == 2):
                    receive.finish(inbox.error)
                    return receive
                if inbox.match_unmatched(receive):
                    return receive
            self._receives.append(receive)
            self.unstarted = True
            if src is None:
                self.start()
            if not self._is_watching and not receive.ended:
                self._is_watching = True
                threading.Thread(target=self._watch, name="dtcomm-receives", daemon=True).start()
        return receive

    def start(self) -> None:
        """Start the receives that have not been started."""
        with self.lock:
            self.unstarted = False
            if self._receives:
                for inbox in list(self._inboxes.values()):
                    inbox.progress()

    def progress_inline(self, receive: ReceiveWork) -> None:
        """Process the messages of one rank on the waiting thread, which is faster than waking another one."""
        if receive.wanted_source is None:
            return
        while not receive.ended:
            with self.lock:
                inbox = self._inbox(receive.wanted_source)
                if inbox.is_taken or inbox.peer == self.rank:
                    return
                taken = work = None
                if inbox.work is None and inbox.error is None and self._receives == [receive]:
                    self.unstarted = False
                    taken = inbox.begin_to_take()
                else:
                    self.start()
                    inbox.progress()
                    work = inbox.work
                    if work is None or receive.ended:  # else it is one of the next receives
                        return
                    work.drop_future()  # it would make another thread do the same
            if taken is not None:
                inbox.take(taken, receive)
                continue
            assert work is not None
            try:
                work.wait()
            except DtcommError:  # `progress` gets the same error and delivers it
                pass

    def progress(self, inbox: PeerInbox) -> None:
        """Process a message that has arrived; a thread that completes futures calls this."""
        with self.lock:
            if not self._closed:
                inbox.progress()

    def interrupted(self, error: BaseException) -> None:
        """A wait for a message from any rank was interrupted: tell the ranks that have sent before."""
        with self.lock:
            works = [inbox.work for inbox in self._inboxes.values()]
        for work in works:
            if work is not None:
                work.interrupted(error)

    def has_receive_for(self, peer: int) -> bool:
        """Return whether a message from ``peer`` could match a receive."""
        return any(receive.wanted_source in (None, peer) for receive in self._receives)

    def match(self, peer: int, tag: int) -> ReceiveWork | None:
        """Remove and return the first receive that matches a message."""
        for index, receive in enumerate(self._receives):
            if receive.tag == tag and receive.wanted_source in (None, peer):
                return self._receives.pop(index)
        return None

    def remove(self, receive: ReceiveWork) -> None:
        """Forget a receive that has been matched, unless it has ended meanwhile."""
        if receive in self._receives:
            self._receives.remove(receive)

    def cancel_receives(self, peer: int) -> list[ReceiveWork]:
        """Remove and return the receives that wait for ``peer``, or for any rank, as that might have been ``peer``."""
        cancelled = [receive for receive in self._receives if receive.wanted_source in (None, peer)]
        self._receives = [receive for receive in self._receives if receive not in cancelled]
        return cancelled

    def close(self) -> None:
        """Fail all receives that are still waiting."""
        with self.lock:
            self._closed = True
            receives, self._receives = self._receives, []
            for receive in receives:
                receive.finish(CommunicatorClosed("group: it was destroyed before a message came"))

    def _inbox(self, peer: int) -> PeerInbox:
        inbox = self._inboxes.get(peer)
        if inbox is None:
            inbox = self._inboxes[peer] = PeerInbox(self, peer)
        return inbox

    def _watch(self) -> None:
        """Start receives that no thread waits for. While a receive from any rank is posted, look for senders, too."""
        store, idle = group_store(self.group), 0
        while idle < _IDLE_POLLS:
            with completion.running_native():  # the functions of the engine and of the store are native
                with self.lock:
                    self.polls += 1
                    idle = 0 if self._receives else idle + 1
                    if self._closed:
                        return
                    # A receive that was posted just now is likely to be waited for.
                    if self.unstarted and self._receives and self._receives[0].posted < self.polls - 1:
                        self.start()
                    if idle >= _IDLE_POLLS:
                        self._is_watching = False
                self._look_for_senders(store)
            time.sleep(_POLL_S)

    def _look_for_senders(self, store: Any) -> None:
        """Process the messages of ranks that have begun to send, if there is a receive from any rank."""
        with self.lock:
            if self._closed or not any(receive.wanted_source is None for receive in self._receives):
                return
            unknown = [rank for rank in range(len(self._send_locks)) if rank not in self._inboxes]
        for rank in unknown:
            try:
                has_sent = store.check([_first_send_key(rank, self.rank)])
            except RuntimeError:  # the store's process has ended
                has_sent = False
            if has_sent:
                with self.lock:
                    if not self._closed:
                        self._inbox(rank).progress()


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _first_send_key(src: int, dst: int) -> str:
    return f"dtcomm/p2p/{src}-{dst}"
