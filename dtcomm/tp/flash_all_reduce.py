"""The two-step all-reduce of Flash Communication (Li et al. 2024), with what follows it in the same pass.

Quantise → exchange shards → dequantise, sum, quantise → gather → dequantise, and with the last step plus the bias, plus
the residual stream, and its RMS norm. Every rank's contribution is encoded, the owner's too, so an element goes through
exactly two encodings and, where it has a block of its own token's elements alone, its result depends on that token's
alone: see `Wire.invariant`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dtcomm.collectives import Work, all_gather, all_reduce, all_to_all
from dtcomm.collectives.reduce_ops import supports_two_shot_symmetric
from dtcomm.kernels import ops
from dtcomm.kernels.epilogue import EpilogueTask, epilogue, epilogue_task
from dtcomm.tp.comm_config import Wire


class Norm(NamedTuple):
    """An RMS norm that follows: its weight ([features] or None) and epsilon."""

    weight: torch.Tensor | None
    eps: float


class Epilogue(NamedTuple):
    """What follows a sum; all may be None."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm: Norm | None = None

    def __bool__(self) -> bool:
        return any(each is not None for each in self)

    def rows(self, start: int, stop: int) -> Epilogue:
        """Of some of the tokens."""
        residual = self.residual
        return self if residual is None else self._replace(residual=_flat(residual)[start:stop])


class Result(NamedTuple):
    """The sum, and its norm where one was asked for."""

    y: torch.Tensor
    normed: torch.Tensor | None


class TwoStep:
    """One all-reduce under way, of a contiguous tensor [..., features]: `exchange` is called by making it, then
    `gather`, then `finish`. Several may be under way, their calls in the same order on all ranks."""

    def __init__(self, x: torch.Tensor, wire: Wire) -> None:
        self.x, self.wire, self.codec = x.detach(), wire, wire.codec
        self.flat = self.x.reshape(-1)
        ranks, granule = wire.ranks, self.codec.granularity
        granules = -(-self.flat.numel() // granule)
        self.cuts = [min(self.flat.numel(), granules * rank // ranks * granule) for rank in range(ranks + 1)]
        largest = max(stop - start for start, stop in zip(self.cuts, self.cuts[1:]))
        # Shares differ by a granule: all travel in room for the largest.
        self.room = self.codec.wire_bytes(largest, x.dtype)
        sent = torch.empty(ranks, self.room, dtype=torch.uint8, device=x.device)
        for rank in range(ranks):
            self._encode(rank, sent[rank])
        self.received = torch.empty_like(sent)
        self.gathered = torch.empty_like(sent)
        self._work: Work | None = all_to_all(self.received, sent, group=wire.group, async_op=True)

    def gather(self) -> None:
        """Once the shards are here, their sum goes to all."""
        self._wait()
        own = self.wire.rank
        numel = self._numel(own)
        mine = self.received.new_empty(self.room)
        if numel:
            payloads = [self._payload(self.received[rank], own) for rank in range(self.wire.ranks)]
            ops.reduce_encode(self.codec, payloads, numel, out=self._payload(mine, own), dtype=self.x.dtype)
        self._work = all_gather(self.gathered, mine, group=self.wire.group, async_op=True)

    def finish(self, out: torch.Tensor, normed: torch.Tensor | None, after: Epilogue) -> None:
        """The sum, with what follows it, in `out` and `normed`, of the tensor's shape."""
        self._wait()
        runs = [
            (self._payload(self.gathered[rank], rank), self._numel(rank))
            for rank in range(self.wire.ranks)
            if self._numel(rank)
        ]
        norm = after.norm
        epilogue(
            self.codec,
            runs,
            out,
            bias=after.bias,
            residual=after.residual,
            weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            norm_out=normed,
        )

    @property
    def sent_bytes(self) -> int:
        """What this rank sends to others."""
        return 2 * (self.wire.ranks - 1) * self.room

    def _encode(self, rank: int, to: torch.Tensor) -> None:
        start, stop = self.cuts[rank], self.cuts[rank + 1]
        if start < stop:
            ops.encode(self.codec, self.flat[start:stop], out=self._payload(to, rank), offset=start)

    def _payload(self, room: torch.Tensor, rank: int) -> torch.Tensor:
        return room[: self.codec.wire_bytes(self._numel(rank), self.x.dtype)]

    def _numel(self, rank: int) -> int:
        return self.cuts[rank + 1] - self.cuts[rank]

    def _wait(self) -> None:
        assert self._work is not None
        self._work.wait()


def two_step(x: torch.Tensor, wire: Wire, after: Epilogue = Epilogue()) -> Result:  # noqa: B008
    """The sum of `x` over the ranks in ``wire.codec``, with what follows it."""
    if supports_two_shot_symmetric(x, wire.codec, wire.group):
        y = x.detach().clone(memory_format=torch.contiguous_format)
        normed = None if after.norm is None else torch.empty_like(y)
        then = following(y, normed, after) if after else None
        all_reduce(y, codec=wire.codec, algorithm="two_shot_symmetric", group=wire.group, epilogue=then)
        return Result(y, normed)
    step = TwoStep(x.contiguous(), wire)
    step.gather()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = None if after.norm is None else torch.empty_like(y)
    step.finish(y, normed, after)
    return Result(y, normed)


def following(y: torch.Tensor, normed: torch.Tensor | None, after: Epilogue) -> EpilogueTask:
    """What follows a sum in ``y``."""
    norm = after.norm
    contiguous = {
        "bias": after.bias,
        "residual": after.residual,
        "weight": None if norm is None else norm.weight,
    }
    return epilogue_task(
        y,
        **{
            name: None if tensor is None else tensor.detach().contiguous()
            for name, tensor in contiguous.items()
        },
        eps=0.0 if norm is None else norm.eps,
        norm_out=normed,
    )


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1]).contiguous()
