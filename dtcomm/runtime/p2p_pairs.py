"""Point-to-point messages: a pair of communicators for two ranks of a group, made when the two first talk.

The other ranks of the group take no part. Each direction has a communicator of its own, so sends do not wait for
receives. Making the pair takes both ranks, and a rank that starts a message must not wait for its peer: messages
started before the pair exists are deferred, and a thread starts them in order once the peer has come.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from dtcomm.errors import DtcommError
from dtcomm.runtime.bootstrap.store_exchange import Deadline
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.communicator_cache import group_entry
from dtcomm.runtime.process_groups import group_timeout, position, require_group
from dtcomm.work import DeferredWork, Work

Communicators = tuple[Communicator, Communicator]  # to the peer and from it
Start = Callable[[Communicator], Work | None]
_pairs_lock = threading.Lock()


class Pair:
    """This rank and one peer.

    Attributes:
        failed: Whether the communicators could not be made; later messages need another pair.

    Args:
        make: Waits for the peer and returns the communicators to it and from it.
    """

    def __init__(self, make: Callable[[], Communicators]) -> None:
        self.failed = False
        self._make = make
        self._lock = threading.Lock()
        self._begun = False
        self._ready = threading.Event()  # there are communicators, or an error
        self._deferred: list[tuple[DeferredWork, bool, Start]] = []
        self._communicators: Communicators | None = None
        self._error: BaseException | None = None
        self._closed = False

    def communicator(self, sends: bool) -> Communicator:
        """The communicator to send through or to receive from. Waits for the peer; raises if it does not come."""
        if self._communicators is None:
            with self._lock:
                first, self._begun = not self._begun, True
            if first:
                self._connect()
            self._ready.wait()
        return self._require(sends)

    def start_deferred(self, sends: bool, start: Start, outputs: Sequence[torch.Tensor]) -> Work:
        """Start a message now if the pair exists, else as soon as it does."""
        with self._lock:
            if not self._ready.is_set():
                work = DeferredWork(outputs)
                self._deferred.append((work, sends, start))
                first, self._begun = not self._begun, True
                if first:
                    threading.Thread(target=self._connect, name="dtcomm-pair", daemon=True).start()
                return work
        return _started(start, self.communicator(sends))

    def close(self) -> None:
        """Close both communicators."""
        with self._lock:
            self._closed = True
            self._close_communicators()

    def _connect(self) -> None:
        try:
            communicators = self._make()
        except BaseException as error:
            self._error = error
            self.failed = True
        else:
            self._communicators = communicators
        with self._lock:
            if self._closed:
                self._close_communicators()
            deferred, self._deferred = self._deferred, []
            for work, sends, start in deferred:
                work.begin(functools.partial(self._start, sends, start))
            self._ready.set()
        for work, _, _ in deferred:  # outside of the lock: a callback may send again
            work.connect_future()

    def _start(self, sends: bool, start: Start) -> Work:
        return _started(start, self._require(sends))

    def _require(self, sends: bool) -> Communicator:
        if self._communicators is None:
            assert self._error is not None
            raise type(self._error)(*self._error.args)
        return self._communicators[0 if sends else 1]

    def _close_communicators(self) -> None:
        for communicator in self._communicators or ():
            communicator.close()
        if self._error is None:
            self._error = DtcommError("group: its communicators have been released")
        self._communicators = None


def pair_of(
    group: dist.ProcessGroup | None,
    peer: int,
    argument: str,
    purpose: str = "",
    device: torch.device | None = None,
) -> Pair:
    """The pair of this rank and a peer.

    Args:
        group: The process group; None is the default group.
        peer: The peer's global rank.
        argument: What errors call ``peer``.
        purpose: Messages of different purposes use different pairs.
        device: The device of the tensors; None is the CPU. Each device has pairs of its own.

    Raises:
        ValueError: If the peer is not in the group or is this rank.
    """
    purpose += "" if device is None else f"{device.type}/"
    target = require_group(group)
    entry = group_entry(target)
    pair: Pair | None = entry.pairs.get((peer, purpose))
    if pair is not None and not pair.failed:
        return pair
    ranks = dist.get_process_group_ranks(target)
    own, other = dist.get_rank(target), position(ranks, peer, argument)
    if own == other:
        raise ValueError(f"{argument}: rank {peer} is this rank itself")
    with _pairs_lock:  # of two threads that find no usable pair, one makes it
        pair = entry.pairs.get((peer, purpose))
        if pair is None or pair.failed:
            pair = Pair(lambda: _make(target, own, other, purpose, device))
            entry.pairs[peer, purpose] = pair
        return pair


def _started(start: Start, communicator: Communicator) -> Work:
    work = start(communicator)
    assert work is not None
    return work


def _make(
    group: dist.ProcessGroup, own: int, other: int, purpose: str, device: torch.device | None
) -> Communicators:
    low, high = sorted((own, other))
    deadline = Deadline(group_timeout(group))

    def make(direction: str) -> Communicator:
        name = f"{purpose}{low}-{high}/{direction}"
        return Communicator(group, name, members=(low, high), device=device, deadline=deadline)

    up = make("up")
    try:
        down = make("down")
    except BaseException:
        up.close()
        raise
    return (up, down) if own == low else (down, up)
