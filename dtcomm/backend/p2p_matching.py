"""send and recv as torch has them: matched by source and tag, from any source, in any order.

The engine's messages between two ranks come in their order, with sizes that both know. So each message is announced
by a note of a fixed size (tag, bytes), which carries the message itself where it is short. A receiver reads the
notes in their order, gives each message to the first receive that it fits, and keeps what nobody has asked for yet:
a short message is kept as it is, a long one stays with its sender until somebody asks for it or for one behind it.
"""

from __future__ import annotations

import struct
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.backend.p2p_receive import Receive
from dtcomm.backend.tensor_views import flat
from dtcomm.backend.work import Finished, Pending
from dtcomm.collectives.p2p import post
from dtcomm.errors import CollectiveMismatch, DtcommError
from dtcomm.runtime.p2p_pairs import Pair, pair_of
from dtcomm.runtime.process_groups import group_store

NOTE_BYTES = 2048
_HEAD = struct.Struct("<qq")  # tag, bytes
_SHORT = NOTE_BYTES - _HEAD.size
_LOOK_S = 0.002  # between two looks for ranks that have begun to send, while somebody receives from any


class Inbox:
    """What comes from one rank. All methods are called with the mail's lock held."""

    def __init__(self, mail: Mail, peer: int) -> None:
        self.peer = peer
        self.work: collectives.Work | None = None  # the one message under way: a note or what it announced
        self._mail = mail
        self._pair: Pair | None = None
        self._note = torch.empty(NOTE_BYTES, dtype=torch.uint8)
        self._view: Any = self._note.numpy()  # the same memory, as struct reads it
        self._kept: list[tuple[int, torch.Tensor]] = []  # (tag, message), in the order in which they came
        self._announced: tuple[int, int] | None = (
            None  # (tag, bytes) of a long message that is still to be fetched
        )
        self._into: Receive | None = None  # who gets the message under way; None: it is kept
        self._fetched: torch.Tensor | None = None
        self.error: BaseException | None = None

    def take_kept(self, receive: Receive) -> bool:
        """Serve a receive from what came before."""
        for index, (tag, message) in enumerate(self._kept):
            if tag == receive.tag:
                del self._kept[index]
                self._deliver(receive, message)
                return True
        return False

    def keep(self, tag: int, message: torch.Tensor) -> None:
        """A message that comes otherwise than through the engine: from this rank itself."""
        receive = self._mail.claim(self.peer, tag)
        if receive is None:
            self._kept.append((tag, message))
        else:
            self._deliver(receive, message)

    def go_on(self) -> None:
        """Take in what has come and ask for more, as long as somebody waits for something."""
        while self.error is None:
            if self.work is not None:
                if not self.work.is_completed():
                    return
                work, self.work = self.work, None
                try:
                    work.wait()
                except BaseException as error:
                    self.fail(error)
                    return
                self._arrived()
            elif self._announced is not None:
                if not self._mail.waits(self.peer):
                    return
                self._fetch()
            elif self._mail.waits(self.peer) and self.peer != self._mail.rank:
                self._start(self._note)
            else:
                return

    def fail(self, error: BaseException) -> None:
        """Nothing will come any more."""
        self.error = error
        if self._into is not None:
            self._into.finish(error)
        for receive in self._mail.give_up(self.peer):
            receive.finish(error)

    def _start(self, memory: torch.Tensor) -> None:
        try:
            if self._pair is None:
                self._pair = pair_of(self._mail.group, self._mail.ranks[self.peer], "src", "mail")
            self.work = post(self._pair, memory, sends=False)
            if not self.work.is_completed():
                self.work.get_future().add_done_callback(lambda _: self._mail.go_on(self))
        except BaseException as error:
            self.fail(error)

    def _arrived(self) -> None:
        if self._fetched is not None:  # what a note had announced
            assert self._announced is not None
            (tag, _), self._announced = self._announced, None
            message, self._fetched = self._fetched, None
            receive, self._into = self._into, None
            if receive is None:
                self.keep(tag, message)
            elif message is receive.bytes:
                receive.source = self.peer
                receive.finish()
            else:
                self._deliver(receive, message)
            return
        tag, size = _HEAD.unpack_from(self._view)
        if size <= _SHORT:
            self.keep(tag, self._note[_HEAD.size : _HEAD.size + size].clone())
        else:
            self._announced = (tag, size)

    def _fetch(self) -> None:
        assert self._announced is not None
        tag, size = self._announced
        self._into = self._mail.claim(self.peer, tag)
        if self._into is not None and self._into.bytes.numel() == size:
            self._fetched = self._into.bytes
        else:
            self._fetched = torch.empty(size, dtype=torch.uint8)
        self._start(self._fetched)

    def _deliver(self, receive: Receive, message: torch.Tensor) -> None:
        receive.source = self.peer
        if message.numel() != receive.bytes.numel():
            receive.finish(
                CollectiveMismatch(
                    f"rank {self._mail.ranks[self.peer]} sends {message.numel()} bytes with tag {receive.tag}, "
                    f"rank {self._mail.ranks[self._mail.rank]} receives {receive.bytes.numel()}"
                )
            )
            return
        receive.bytes.copy_(message)
        receive.finish()


class Mail:
    """The messages between the ranks of one group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.lock = threading.RLock()
        self._sending = [threading.Lock() for _ in range(group.size())]
        self._greeted: set[int] = set()
        self._inboxes: dict[int, Inbox] = {}
        self._waiting: list[Receive] = []  # in the order in which they were posted
        self._looking = False
        self._closed = False

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group."""
        return dist.get_process_group_ranks(self.group)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> dist.Work:
        """Start a message; its handle is done when the tensor may be changed."""
        run = flat(tensor)
        message = run.view(torch.uint8) if run.numel() else run.new_empty(0, dtype=torch.uint8)
        if dst == self.rank:
            with self.lock:
                self._inbox(dst).keep(tag, message.clone())
            return Finished([tensor])
        size = message.numel()
        note = bytearray(NOTE_BYTES)
        _HEAD.pack_into(note, 0, tag, size)
        carrier = torch.frombuffer(note, dtype=torch.uint8)
        if 0 < size <= _SHORT:
            carrier[_HEAD.size : _HEAD.size + size] = message
        pair = pair_of(self.group, self.ranks[dst], "dst", "mail")
        with self._sending[dst]:  # nobody's message between a note and what it announces
            if dst not in self._greeted:
                self._greeted.add(dst)
                group_store(self.group).set(_greeting(self.rank, dst), "1")
            work = post(pair, carrier, sends=True)
            if size > _SHORT:
                work = post(pair, message, sends=True)
        return Pending(work, [tensor])

    def receive(self, tensor: torch.Tensor, src: int | None, tag: int) -> Receive:
        """Start to receive from one rank of the group, or from any (None)."""
        receive = Receive(self, tensor, flat(tensor), src, tag)
        with self.lock:
            if self._closed:
                raise DtcommError("group: it has been destroyed")
            inboxes = list(self._inboxes.values()) if src is None else [self._inbox(src)]
            for inbox in inboxes:
                if inbox.error is not None and (src is not None or len(self.ranks) == 2):
                    receive.finish(inbox.error)
                    return receive
                if inbox.take_kept(receive):
                    return receive
            self._waiting.append(receive)
            for inbox in inboxes:
                inbox.go_on()
            if not receive.is_completed() and src is None and not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="dtcomm-any-source", daemon=True).start()
        return receive

    def attend(self, receive: Receive) -> None:
        """The caller waits for a message of one rank: take in itself what comes, as nobody is quicker."""
        if receive.wanted is None:
            return
        while not receive.is_completed():
            with self.lock:
                inbox = self._inbox(receive.wanted)
                inbox.go_on()
                work = inbox.work
                if work is None:
                    return
                work.drop_future()  # which would have another thread do what is done here
            try:
                work.wait()
            except BaseException:  # which go_on will find and hand out
                pass

    def go_on(self, inbox: Inbox) -> None:
        """Something has come for an inbox; called by the thread that completes futures."""
        with self.lock:
            if not self._closed:
                inbox.go_on()

    def waits(self, peer: int) -> bool:
        """Whether there is a receive that a message of ``peer`` could be for."""
        return any(receive.wanted in (None, peer) for receive in self._waiting)

    def claim(self, peer: int, tag: int) -> Receive | None:
        """The first receive that a message fits; it waits no more."""
        for index, receive in enumerate(self._waiting):
            if receive.tag == tag and receive.wanted in (None, peer):
                return self._waiting.pop(index)
        return None

    def give_up(self, peer: int) -> list[Receive]:
        """The receives that wait for ``peer``, those from any rank included: it might have been the one."""
        lost = [receive for receive in self._waiting if receive.wanted in (None, peer)]
        self._waiting = [receive for receive in self._waiting if receive not in lost]
        return lost

    def close(self) -> None:
        """Whoever still waits is told."""
        with self.lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
            for receive in waiting:
                receive.finish(DtcommError("group: it was destroyed before a message came"))

    def _inbox(self, peer: int) -> Inbox:
        found = self._inboxes.get(peer)
        if found is None:
            found = self._inboxes[peer] = Inbox(self, peer)
        return found

    def _look(self) -> None:
        """While somebody receives from any rank, look who has begun to send."""
        store = group_store(self.group)
        while True:
            with self.lock:
                if self._closed or not any(receive.wanted is None for receive in self._waiting):
                    self._looking = False
                    return
                unknown = [rank for rank in range(len(self._sending)) if rank not in self._inboxes]
            for rank in unknown:
                try:
                    came = store.check([_greeting(rank, self.rank)])
                except RuntimeError:  # the store is gone with its rank
                    came = False
                if came:
                    with self.lock:
                        if not self._closed:
                            self._inbox(rank).go_on()
            time.sleep(_LOOK_S)


def _greeting(src: int, dst: int) -> str:
    return f"dtcomm/mail/{src}-{dst}"
