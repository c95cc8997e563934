"""Messages between pipeline stages: sends under way, and receipts in the order of their messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec, codec
from dtcomm.collectives import Work, recv, send
from dtcomm.compress.traffic import Traffic

NONE = codec("none")
MESSAGES = "messages between stages"
MAX_DIMS = 8  # of a tensor whose shape travels with it


class Link(NamedTuple):
    """The other end of messages.

    Attributes:
        peer: Global rank of the stage there.
        group: Process group that contains both ranks.
    """

    peer: int
    group: dist.ProcessGroup | None


#: The steps of a receipt: each posts a receive and yields it, and whether it is the last one of the message. A step is
#: run when the receive before it is complete; what follows the last yield runs when the whole message is there.
Steps = Iterator[tuple[Work, bool]]


class Receipt:
    """A message that is to be received."""

    def __init__(self, inbox: Inbox, steps: Steps) -> None:
        self._inbox, self._steps = inbox, steps
        self._work: Work | None = None
        self.all_posted = False

    def post_next(self, *, wait: bool) -> bool:
        """Post the next receive of the message, when the one before is complete.

        Args:
            wait: Wait for the one before; otherwise return False if it is not complete.
        """
        if self._work is not None:
            if not wait and not self._work.is_completed():
                return False
            self._work.wait()
        self._work, self.all_posted = next(self._steps)
        return True

    def wait(self) -> None:
        """Wait until the message is there."""
        self._inbox.post_until(self)
        assert self._work is not None  # post_until has posted all receives
        self._work.wait()
        for _ in self._steps:
            raise AssertionError("a receive was posted behind the last one")


class Inbox:
    """The messages from one rank, whose receives must be posted in the order in which it sends them."""

    def __init__(self) -> None:
        self._waiting: deque[Receipt] = deque()

    def add(self, steps: Steps) -> Receipt:
        """Add a message and post what can be posted without waiting."""
        receipt = Receipt(self, steps)
        self._waiting.append(receipt)
        while self._waiting and self._waiting[0].post_next(wait=False):
            if self._waiting[0].all_posted:
                self._waiting.popleft()
        return receipt

    def post_until(self, receipt: Receipt) -> None:
        """Post all receives of the message, and of those before it."""
        while not receipt.all_posted:
            self._waiting[0].post_next(wait=True)
            if self._waiting[0].all_posted:
                self._waiting.popleft()


class Exchange:
    """All messages of the stages of one rank.

    Messages from one rank to another arrive in the order in which they were sent, whatever stages and micro-batches
    they belong to. Both ranks run the same schedule, so they agree on that order.
    """

    def __init__(self) -> None:
        self._inboxes: dict[tuple[int, str], Inbox] = {}
        self._sent: deque[tuple[Work, Traffic, int]] = deque()

    def send(
        self,
        tensor: torch.Tensor,
        link: Link,
        spec: Codec,
        traffic: Traffic,
        plain_bytes: int,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Start to send a contiguous tensor.

        Args:
            tensor: The tensor, which must stay unchanged until `finish_sends`.
            link: Where to.
            spec: Codec.
            traffic: Counters of such messages.
            plain_bytes: Bytes that the message stands for, uncompressed.
            residual: Residual of error feedback.
        """
        work = send(tensor, link.peer, codec=spec, group=link.group, async_op=True, residual=residual)
        self._sent.append((work, traffic, plain_bytes))
        while self._sent and self._sent[0][0].is_completed():
            self._finish_oldest()

    def finish_sends(self) -> None:
        """Wait until the peers have received everything; raises the error of a message that failed."""
        while self._sent:
            self._finish_oldest()

    def drop(self) -> None:
        """Forget what a failed step has left."""
        self._sent.clear()
        self._inboxes.clear()

    def receive(self, link: Link, steps: Steps) -> Receipt:
        """Add a message that the peer sends next."""
        group = link.group or dist.group.WORLD
        name = "" if group is None else group.group_name
        return self._inboxes.setdefault((link.peer, name), Inbox()).add(steps)

    def _finish_oldest(self) -> None:
        work, traffic, plain_bytes = self._sent.popleft()
        work.wait()
        traffic.add(work, plain_bytes)


def receive_tensor(buffer: torch.Tensor, link: Link, spec: Codec) -> Steps:
    """Receive a message into ``buffer``, which has any strides."""
    memory = buffer.detach()
    target = (
        memory if memory.is_contiguous() else torch.empty_like(memory, memory_format=torch.contiguous_format)
    )
    yield post_receive(target, link, spec), True
    if target is not memory:
        memory.copy_(target)


def post_receive(target: torch.Tensor, link: Link, spec: Codec) -> Work:
    """Post the receive of one tensor, which is contiguous."""
    return recv(as_sendable(target, spec), link.peer, codec=spec, group=link.group, async_op=True)


def as_sendable(tensor: torch.Tensor, spec: Codec) -> torch.Tensor:
    """Return a contiguous tensor as it travels: as bytes if no codec takes its type."""
    return tensor if tensor.dtype in spec.dtypes else tensor.view(torch.uint8)


def shape_header(tensor: torch.Tensor) -> torch.Tensor:
    """Return the message that precedes a tensor of any shape, int64 [1 + MAX_DIMS].

    Raises:
        ValueError: The tensor has more dimensions than that.
    """
    if tensor.ndim > MAX_DIMS:
        raise ValueError(f"dynamic_shapes: valid: up to {MAX_DIMS} dimensions, got {tuple(tensor.shape)}")
    return torch.tensor([tensor.ndim, *tensor.shape, *[0] * (MAX_DIMS - tensor.ndim)], dtype=torch.int64)
