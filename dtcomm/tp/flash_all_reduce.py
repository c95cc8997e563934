"""The symmetric two-shot all-reduce of Flash Communication (Li et al. 2024, arXiv:2412.04964), with a fused epilogue.

Step one encodes every shard and exchanges the shards; each rank decodes and sums its own. Step two encodes the sum and
gathers it; the pass that decodes it applies the epilogue. The owner's contribution is encoded as all others are.
Every element therefore goes through exactly two encodings, and where the blocks of the codec do not span tokens, a
token's result depends on that token alone (`CommConfig.batch_invariant`). The two-shot all-reduce of
`dtcomm.all_reduce` differs in this one point: it adds the owner's contribution unencoded.

An `Epilogue` is bias, residual stream and RMS norm. `flash_all_reduce` and `dtcomm.tp.row_linear` take one;
`dtcomm.kernels.epilogue` computes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dtcomm.collectives import Work, all_gather, all_reduce, all_to_all
from dtcomm.collectives.groups import supports_two_shot_symmetric
from dtcomm.kernels import ops
from dtcomm.kernels.epilogue import EpilogueTask, epilogue_task
from dtcomm.kernels.epilogue import epilogue as apply_epilogue
from dtcomm.tp.comm_config import CommConfig


class Norm(NamedTuple):
    """An RMS norm: its weight ([features], or None for a norm without a weight) and its epsilon."""

    weight: torch.Tensor | None
    eps: float


class Epilogue(NamedTuple):
    """The operations after a sum, in this order; each may be None.

    Attributes:
        bias: [features], added to every row.
        residual: The residual stream, of the sum's shape, added to the sum.
        norm: RMS norm of the result, which is returned beside it.
    """

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm: Norm | None = None

    def __bool__(self) -> bool:
        return any(operation is not None for operation in self)

    @property
    def norm_weight(self) -> torch.Tensor | None:
        """The norm's weight, or None."""
        return None if self.norm is None else self.norm.weight

    @property
    def eps(self) -> float:
        """The norm's epsilon; 0 without a norm."""
        return 0.0 if self.norm is None else self.norm.eps

    def rows(self, start: int, stop: int) -> Epilogue:
        """Return the epilogue of the rows (tokens) ``start`` to ``stop - 1``."""
        residual = self.residual
        if residual is None:
            return self
        flat = residual.detach().reshape(-1, residual.shape[-1]).contiguous()
        return self._replace(residual=flat[start:stop])

    def task(self, y: torch.Tensor, normed: torch.Tensor | None) -> EpilogueTask:
        """Return the kernel task that applies the epilogue to the sum in ``y``, in place, and writes ``normed``.

        A collective takes the task as its epilogue and runs it on every piece of the sum that it has decoded.
        """
        bias, residual, weight = (
            None if tensor is None else tensor.detach().contiguous()
            for tensor in (self.bias, self.residual, self.norm_weight)
        )
        return epilogue_task(y, bias=bias, addend=residual, weight=weight, eps=self.eps, norm_out=normed)


class EpilogueResult(NamedTuple):
    """The sum with bias and residual, and its norm if the epilogue has one."""

    y: torch.Tensor
    normed: torch.Tensor | None


def flash_all_reduce(x: torch.Tensor, comm: CommConfig, epilogue: Epilogue = Epilogue()) -> EpilogueResult:  # noqa: B008
    """Sum ``x`` over the ranks in ``comm.codec`` and apply ``epilogue``; the result has no gradient.

    ``x`` is an fp32, fp16 or bf16 tensor [..., features], of the same shape on all ranks. It is not changed.
    """
    if supports_two_shot_symmetric(x, comm.codec, comm.group):
        y = x.detach().clone(memory_format=torch.contiguous_format)
        normed = None if epilogue.norm is None else torch.empty_like(y)
        task = epilogue.task(y, normed) if epilogue else None
        all_reduce(y, codec=comm.codec, algorithm="two_shot_symmetric", group=comm.group, epilogue=task)
        return EpilogueResult(y, normed)
    operation = FlashAllReduce(x.contiguous(), comm)
    operation.start_gather()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = None if epilogue.norm is None else torch.empty_like(y)
    operation.finish(y, normed, epilogue)
    return EpilogueResult(y, normed)


class FlashAllReduce:
    """One symmetric two-shot all-reduce in progress, of a contiguous tensor [..., features], made of two collectives.

    The constructor starts the exchange of shards, `start_gather` the gather of sums, and `finish` decodes the result.
    Several may be in progress at once if all ranks make the calls in the same order.
    """

    def __init__(self, x: torch.Tensor, comm: CommConfig) -> None:
        self.x, self.comm, self.codec = x.detach(), comm, comm.codec
        self.flat = self.x.reshape(-1)
        world_size, granularity = comm.world_size, self.codec.granularity
        granules = -(-self.flat.numel() // granularity)
        #: Rank r owns the elements offsets[r] to offsets[r + 1] - 1.
        self.offsets = [
            min(self.flat.numel(), granules * rank // world_size * granularity)
            for rank in range(world_size + 1)
        ]
        largest = max(stop - start for start, stop in zip(self.offsets, self.offsets[1:]))
        # Shards differ by at most one granule: all use slots of the largest shard's size.
        self.slot_bytes = self.codec.wire_bytes(largest, x.dtype)
        sent = torch.empty(world_size, self.slot_bytes, dtype=torch.uint8, device=x.device)
        for rank in range(world_size):
            self._encode(rank, sent[rank])
        self.received = torch.empty_like(sent)
        self.gathered = torch.empty_like(sent)
        self._work: Work | None = all_to_all(self.received, sent, group=comm.group, async_op=True)

    def start_gather(self) -> None:
        """Wait for the shards, sum and encode them, and start the gather of the sums."""
        self._wait()
        rank = self.comm.rank
        numel = self._shard_numel(rank)
        payload = self.received.new_empty(self.slot_bytes)
        if numel:
            payloads = [self._payload(slot, rank) for slot in self.received]
            ops.reduce_encode(
                self.codec, payloads, numel, out=self._payload(payload, rank), dtype=self.x.dtype
            )
        self._work = all_gather(self.gathered, payload, group=self.comm.group, async_op=True)

    def finish(self, out: torch.Tensor, normed: torch.Tensor | None, epilogue: Epilogue) -> None:
        """Wait for the sums and decode them, with the epilogue, into ``out`` and ``normed`` (both of x's shape)."""
        self._wait()
        payloads = [
            (self._payload(self.gathered[rank], rank), self._shard_numel(rank))
            for rank in range(self.comm.world_size)
            if self._shard_numel(rank)
        ]
        apply_epilogue(
            self.codec,
            payloads,
            out,
            bias=epilogue.bias,
            addend=epilogue.residual,
            weight=epilogue.norm_weight,
            eps=epilogue.eps,
            norm_out=normed,
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to other ranks."""
        return 2 * (self.comm.world_size - 1) * self.slot_bytes

    def _encode(self, rank: int, slot: torch.Tensor) -> None:
        start, stop = self.offsets[rank], self.offsets[rank + 1]
        if start < stop:
            ops.encode(self.codec, self.flat[start:stop], out=self._payload(slot, rank), offset=start)

    def _payload(self, slot: torch.Tensor, rank: int) -> torch.Tensor:
        return slot[: self.codec.wire_bytes(self._shard_numel(rank), self.x.dtype)]

    def _shard_numel(self, rank: int) -> int:
        return self.offsets[rank + 1] - self.offsets[rank]

    def _wait(self) -> None:
        assert self._work is not None
        self._work.wait()
