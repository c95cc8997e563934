"""Messages between pipeline stages: `Exchange` for the stages of torch, `Sender` and `Receiver` for other schedules.

`Exchange` holds all sends under way of a rank, and its receipts in the order of their messages. A link is one `Sender`
and one `Receiver` with the same codecs: activations are sent forward, gradients back. Compression is straight-through.
Micro-batches may overlap in any schedule (GPipe, 1F1B) in which a link's gradients return in the order of its
activations: messages of one direction arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec, codec
from dtcomm.collectives import Work, recv, send
from dtcomm.compress.residuals import Residuals
from dtcomm.compress.spec import choose_feedback, message_codec
from dtcomm.compress.traffic import Traffic
from dtcomm.torch_compat import autograd_apply

NONE = codec("none")
MESSAGES = "messages between stages"
MAX_DIMS = 8  # of a tensor whose shape is sent with it


def message_codecs(codec: str | Codec, backward_codec: str | Codec | None) -> tuple[Codec, Codec]:
    """Return the codecs of activations and of gradients, by default the same; errors name the argument."""
    forward = message_codec(codec, "codec", MESSAGES)
    return forward, forward if backward_codec is None else message_codec(
        backward_codec, "backward_codec", MESSAGES
    )


class Link(NamedTuple):
    """The other end of messages: the global rank of the stage there, and a group that contains both ranks."""

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
        """Post the next receive of the message, when the one before is complete; wait for that, or return False."""
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

    Args:
        seed: Seed of stochastic rounding; the number of the message is added.

    Attributes:
        messages: Number of messages that were sent.
    """

    def __init__(self, seed: int = 0) -> None:
        self.messages = 0
        self._seed = seed
        self._inboxes: dict[tuple[int, str], Inbox] = {}
        self._sent: deque[tuple[Work, Traffic, int]] = deque()

    def send(
        self,
        tensor: torch.Tensor,
        link: Link,
        codec: Codec,
        traffic: Traffic,
        plain_bytes: int,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Start to send a contiguous tensor, which must stay unchanged until `finish_sends`.

        ``plain_bytes`` is what the message stands for, uncompressed.
        """
        options: dict[str, Any] = {
            "codec": codec,
            "group": link.group,
            "seed": self.next_seed(),
            "residual": residual,
        }
        work = send(tensor, link.peer, async_op=True, **options)
        self._sent.append((work, traffic, plain_bytes))
        while self._sent and self._sent[0][0].is_completed():
            self._finish_oldest()

    def next_seed(self) -> int:
        """Return the seed of the next message."""
        self.messages += 1
        return self._seed + self.messages

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


def receive_tensor(buffer: torch.Tensor, link: Link, codec: Codec) -> Steps:
    """Receive a message into ``buffer``, which has any strides."""
    memory = buffer.detach()
    target = (
        memory if memory.is_contiguous() else torch.empty_like(memory, memory_format=torch.contiguous_format)
    )
    yield post_receive(target, link, codec), True
    if target is not memory:
        memory.copy_(target)


def post_receive(target: torch.Tensor, link: Link, codec: Codec) -> Work:
    """Post the receive of one tensor, which is contiguous."""
    return recv(as_sendable(target, codec), link.peer, codec=codec, group=link.group, async_op=True)


def as_sendable(tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Return a contiguous tensor as it is sent: as bytes if no codec takes its type."""
    return tensor if tensor.dtype in codec.dtypes else tensor.view(torch.uint8)


def shape_header(tensor: torch.Tensor) -> torch.Tensor:
    """Return the message that precedes a tensor of any shape, int64 [1 + MAX_DIMS]."""
    if tensor.ndim > MAX_DIMS:
        raise ValueError(f"dynamic_shapes: valid: up to {MAX_DIMS} dimensions, got {tuple(tensor.shape)}")
    return torch.tensor([tensor.ndim, *tensor.shape, *[0] * (MAX_DIMS - tensor.ndim)], dtype=torch.int64)


class _LinkEnd:
    def __init__(
        self,
        peer: int,
        codec: str | Codec = "none",
        backward_codec: str | Codec | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        self.peer, self.group = peer, group
        self.codec, self.backward_codec = message_codecs(codec, backward_codec)
        self._exchange, self._traffic = Exchange(seed), Traffic(codec=str(codec))

    @property
    def sent_bytes(self) -> int:
        """Bytes of the completed messages; `flush` completes all."""
        return self._traffic.wire_bytes

    def _send(self, tensor: torch.Tensor, codec: Codec, residual: torch.Tensor | None = None) -> None:
        link = Link(self.peer, self.group)
        self._exchange.send(tensor, link, codec, self._traffic, tensor.nbytes, residual)
        if residual is not None:  # encoding rewrites it, which must be over before the next message
            self.flush()

    def flush(self) -> None:
        """Wait until the peer has received all messages; raises the error of one that failed."""
        self._exchange.finish_sends()


class Sender(_LinkEnd):
    """The end of a link that sends activations to the next stage and receives their gradients.

    Args:
        peer: Global rank of the next stage.
        codec: Codec of the activations, a spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of the gradients. Default: that of the activations.
        group: Process group that contains both ranks. Default: the default group.
        seed: Seed of stochastic rounding. Default: 0.

    Example::

        link = dtcomm.pipeline.Sender(1, "int8")
        outputs = [link(block(batch)) for batch in micro_batches]
        for output in outputs:
            output.backward()
        link.flush()
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Send ``x`` (any shape).

        Returns:
            A scalar zero. Its ``backward()`` receives the gradient and passes it on to ``x``.
        """
        zero: torch.Tensor = autograd_apply(_SendActivation, x, self)
        return zero


class Receiver(_LinkEnd):
    """The end of a link that receives activations from the previous stage and sends their gradients back.

    Args:
        peer: Global rank of the previous stage.
        codec: Codec of the activations, a spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of the gradients. Default: that of the activations.
        feedback: Error feedback: keep the error of each encoded gradient and add it to the next gradient of the same
            shape. Pays where the gradients of successive steps are similar, as with few bits and large batches.
            ``"auto"``: as for `dtcomm.pipeline.compress`. Default: ``"auto"``.
        group: Process group that contains both ranks. Default: the default group.
        seed: Seed of stochastic rounding. Default: 0.

    Example::

        link = dtcomm.pipeline.Receiver(0, "int8", feedback=True)
        for target in targets:
            loss(block(link((8, 128, 512))), target).backward()
        link.flush()
    """

    def __init__(
        self,
        peer: int,
        codec: str | Codec = "none",
        backward_codec: str | Codec | None = None,
        *,
        feedback: bool | str = "auto",
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(peer, codec, backward_codec, group=group, seed=seed)
        self.feedback, _ = choose_feedback(feedback, [self.backward_codec])
        self._residuals = Residuals()

    def __call__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Receive a tensor.

        Args:
            shape: Shape of the tensor that the peer sends.
            dtype: Its data type. Default: float32.
            device: Its device. Default: torch's default device, the CPU.

        Returns:
            The tensor; its backward pass sends the gradient.
        """
        y = torch.empty(*shape, dtype=dtype, device=device)
        recv(y, self.peer, codec=self.codec, group=self.group)
        received: torch.Tensor = autograd_apply(_ReceiveActivation, y.requires_grad_(), self)
        return received

    def send_gradient(self, gradient: torch.Tensor) -> None:
        """Send the gradient of a received tensor; autograd calls this."""
        residual = None
        if self.feedback and not self.backward_codec.lossless(gradient.dtype):
            residual = self._residuals.get(str(tuple(gradient.shape)), gradient).view(gradient.shape)
        self._send(gradient, self.backward_codec, residual)


class _SendActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, end: Sender) -> torch.Tensor:
        ctx.end, ctx.shape, ctx.dtype, ctx.device = end, x.shape, x.dtype, x.device
        end._send(x.detach().contiguous(), end.codec)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        recv(gradient, ctx.end.peer, codec=ctx.end.backward_codec, group=ctx.end.group)
        return gradient, None


class _ReceiveActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, end: Receiver) -> torch.Tensor:
        ctx.end = end
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.end.send_gradient(gradient.contiguous())
        return None, None
