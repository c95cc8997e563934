"""A link between two stages: `Sender` sends activations forward, `Receiver` sends their gradients back, compressed.

Example::

    # first stage                                    # second stage
    link = dtcomm.pipeline.Sender(1, "int8")         link = dtcomm.pipeline.Receiver(0, "int8")
    sent = link(block(x))                            y = link((8, 128, 512))
                                                     loss(block(y)).backward()     # sends the gradient of y
    sent.backward()                                  # receives it, and continues to x and the parameters

Both ends must have the same codecs. Compression is straight-through. Micro-batches may overlap in any schedule (GPipe,
1F1B) in which a link's gradients return in the order of its activations: messages of one direction arrive in the order
in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm._autograd import autograd_apply
from dtcomm._message_codec import message_codec
from dtcomm.codecs import Codec
from dtcomm.collectives import Work, recv, send
from dtcomm.compress.residuals import Residuals
from dtcomm.pipeline.exchange import MESSAGES

MAX_IN_FLIGHT = 64  # messages; before sending more, a sender waits for the oldest


class _LinkEnd:
    """The common part of both ends of a link."""

    def __init__(
        self,
        peer: int,
        spec: str | Codec = "none",
        backward: str | Codec | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        self.peer, self.group, self.seed = peer, group, seed
        self.codec = message_codec(spec, "spec", MESSAGES)
        self.backward_codec = (
            self.codec if backward is None else message_codec(backward, "backward", MESSAGES)
        )
        self.sent_bytes = 0
        self._messages = 0
        self._in_flight: deque[Work] = deque()

    def _send(self, tensor: torch.Tensor, codec: Codec, residual: torch.Tensor | None = None) -> None:
        self._messages += 1
        work = send(
            tensor,
            self.peer,
            codec=codec,
            group=self.group,
            async_op=True,
            seed=self.seed + self._messages,
            residual=residual,
        )
        self._in_flight.append(work)
        # Encoding rewrites the residual, so it must be finished before the next message uses the residual.
        while len(self._in_flight) > (0 if residual is not None else MAX_IN_FLIGHT):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        work = self._in_flight.popleft()
        work.wait()
        self.sent_bytes += work.wire_bytes

    def flush(self) -> None:
        """Wait until the peer has received all messages; raises the error of one that failed."""
        while self._in_flight:
            self._wait_for_oldest()


class Sender(_LinkEnd):
    """The end of a link that sends activations to the next stage and receives their gradients.

    Args:
        peer: Global rank of the next stage.
        spec: Codec of the activations, a spec or a `Codec`. Default: ``"none"``.
        backward: Codec of the gradients. Default: that of the activations.
        group: Process group that contains both ranks. Default: the default group.
        seed: Seed of stochastic rounding. Default: 0.

    Attributes:
        sent_bytes: Bytes of the completed messages; `flush` completes all.

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
        spec: Codec of the activations, a spec or a `Codec`. Default: ``"none"``.
        backward: Codec of the gradients. Default: that of the activations.
        feedback: Error feedback: keep the error of each encoded gradient and add it to the next gradient of the same
            shape. Pays where the gradients of successive steps are alike, as with few bits and large batches. Default:
            False.
        group: Process group that contains both ranks. Default: the default group.
        seed: Seed of stochastic rounding. Default: 0.

    Attributes:
        sent_bytes: Bytes of the completed messages; `flush` completes all.

    Example::

        link = dtcomm.pipeline.Receiver(0, "int8", feedback=True)
        for target in targets:
            loss(block(link((8, 128, 512))), target).backward()
        link.flush()
    """

    def __init__(
        self,
        peer: int,
        spec: str | Codec = "none",
        backward: str | Codec | None = None,
        *,
        feedback: bool = False,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(peer, spec, backward, group=group, seed=seed)
        self.feedback = feedback
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
