"""Pipeline parallelism with compressed activations and gradients: one end of a link between two stages each.

    first stage                                     second stage
    link = dtcomm.pipeline.Sender(1, "int8")        link = dtcomm.pipeline.Receiver(0, "int8")
    sent = link(block(x))                           y = link((8, 128, 512))
                                                    loss(block(y)).backward()     # sends the gradient of y
    sent.backward()                                 # receives it, and goes on to x and the parameters

Activations travel in `codec`, gradients in `backward_codec`; both ends are told the same. Compression is
straight-through. Micro-batches may overlap in any schedule (GPipe, 1F1B) in which a link's gradients come back in the
order of its activations: those of one direction arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec, codec
from dtcomm.collectives import Work, recv, send
from dtcomm.compress.residuals import Residuals

AT_ONCE = 64  # messages under way before the sender waits for the oldest


class _End:
    """What both ends of a link know."""

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
        self.codec = codec(spec)
        self.backward_codec = self.codec if backward is None else codec(backward)
        self.sent_bytes = 0
        self._calls = 0
        self._under_way: deque[Work] = deque()

    def _send(self, tensor: torch.Tensor, which: Codec, residual: torch.Tensor | None = None) -> None:
        self._calls += 1
        work = send(
            tensor,
            self.peer,
            codec=which,
            group=self.group,
            async_op=True,
            seed=self.seed + self._calls,
            residual=residual,
        )
        self._under_way.append(work)
        # A residual is rewritten by the encoding, so the next one has to find it done.
        while len(self._under_way) > (0 if residual is not None else AT_ONCE):
            self._landed()

    def _landed(self) -> None:
        work = self._under_way.popleft()
        work.wait()
        self.sent_bytes += work.wire_bytes

    def flush(self) -> None:
        """Wait until the peer has everything; raises what went wrong."""
        while self._under_way:
            self._landed()


class Sender(_End):
    """The end of a link that hands activations on to ``peer``, a global rank, and gets their gradients back.

    spec, backward: codecs of activations and gradients; gradients by default as activations.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Send ``x``; returns a zero, whose ``backward()`` receives the gradient and passes it on to ``x``."""
        zero: torch.Tensor = _differentiable(_Sent, x, self)
        return zero


class Receiver(_End):
    """The end of a link that gets activations from ``peer``, a global rank, and sends their gradients back.

    feedback: keep what a gradient's encoding lost and add it to the next one of the same shape. Worth it where
    gradients of successive steps are alike, as with few bits and large batches.
    """

    def __init__(self, *arguments: Any, feedback: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.feedback = feedback
        self._residuals = Residuals()

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Receive a tensor of this shape and type, as the peer sent it; its backward sends the gradient."""
        y = torch.empty(*shape, dtype=dtype)
        recv(y, self.peer, codec=self.codec, group=self.group)
        given: torch.Tensor = _differentiable(_Received, y.requires_grad_(), self)
        return given

    def give_back(self, gradient: torch.Tensor) -> None:
        """Send a gradient; called by autograd."""
        residual = None
        if self.feedback and not self.backward_codec.lossless(gradient.dtype):
            residual = self._residuals.get(str(tuple(gradient.shape)), gradient).view(gradient.shape)
        self._send(gradient, self.backward_codec, residual)


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, end: Sender) -> torch.Tensor:
        ctx.end, ctx.shape, ctx.dtype = end, x.shape, x.dtype
        end._send(x.detach().contiguous(), end.codec)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype)
        recv(gradient, ctx.end.peer, codec=ctx.end.backward_codec, group=ctx.end.group)
        return gradient, None


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, end: Receiver) -> torch.Tensor:
        ctx.end = end
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.end.give_back(gradient.contiguous())
        return None, None


def _differentiable(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)
