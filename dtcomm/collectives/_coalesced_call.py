"""What the coalesced forms have in common: tensors cut into buckets, a message a bucket, all under way at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import require_apart, require_beside, require_pair, require_residual
from dtcomm.collectives._dispatch import plan_for, start
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.types import Buffers
from dtcomm.runtime.work import CompositeWork, Work

Specs = str | Codec | Sequence[str | Codec]
Residuals = Sequence[torch.Tensor | None] | None
BUCKET_BYTES = 25 * 2**20
ALONE_BYTES = 2**20  # of a shard that is only copied: peers take it past the staging, where it travels alone


class Item(NamedTuple):
    """One tensor of a call: what its message counts, and where it comes from and goes to.

    ``numel`` counts as ``TensorSpec`` does, ``nbytes`` the whole tensor; ``alone`` has a message of its own.
    """

    numel: int
    dtype: torch.dtype
    spec: str | Codec
    buffers: Buffers
    output: torch.Tensor
    nbytes: int
    alone: bool = False


class Call(NamedTuple):
    """What all messages of a coalesced call have in common; arguments as in ``plan_for`` and ``start``."""

    communicator: Communicator
    collective: str
    op: Any
    algorithm: str
    checksum: bool | None
    seed: int | None
    async_op: bool

    def run(self, items: Sequence[Item], bucket_bytes: int) -> Work | None:
        """A message for every bucket. All are queued before the first is over: so each begins to encode and send
        while the last pieces of the one before are on their way.
        """
        # All plans first: what is wrong with one message must not leave others under way.
        messages = [(self._plan(part), part) for part in cut(items, bucket_bytes)]
        queued = self.async_op or len(messages) > 1  # only what is queued is begun ahead
        works = [
            start(
                self.communicator,
                plan,
                [item.buffers for item in part],
                [item.output for item in part],
                self.seed,
                queued,
            )
            for plan, part in messages
        ]
        started = [work for work in works if work is not None]
        if self.async_op:
            return (
                started[0] if len(started) == 1 else CompositeWork(started, [item.output for item in items])
            )
        for work in started:
            work.wait()
        return None

    def _plan(self, part: Sequence[Item]) -> Any:
        numels = tuple(item.numel for item in part)
        dtypes = tuple(item.dtype for item in part)
        specs = tuple(item.spec for item in part)
        key = (self.collective, numels, dtypes, self.op, specs, self.algorithm, self.checksum)
        plan = self.communicator.plans.get(key)
        if plan is not None:
            return plan
        return plan_for(
            self.communicator,
            key,
            self.collective,
            self.op,
            numels,
            dtypes,
            specs,
            self.algorithm,
            checksum=self.checksum,
        )


def paired(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    whole: str,
    codec: Specs,
    residuals: Residuals,
    op: Any = "sum",
) -> list[Item]:
    """Outputs and inputs of which the ones named by ``whole``, "output" or "input", hold a shard of every rank."""
    if len(outputs) != len(inputs):
        raise ValueError(f"outputs: {len(outputs)} tensors for {len(inputs)} inputs; give one an input")
    items = []
    specs, losses = one_each(codec, len(inputs)), kept(residuals, len(inputs))
    for index, (output, given, spec, residual) in enumerate(zip(outputs, inputs, specs, losses, strict=True)):
        names = (f"outputs[{index}]", f"inputs[{index}]")
        require_pair(output, given, whole, communicator.size, names)
        require_beside(output, outputs[0], names[0], "outputs[0]")
        large, small = (output, given) if whole == "output" else (given, output)
        holder, part = names if whole == "output" else names[::-1]
        require_apart(large, small, small.numel() * communicator.rank, part, holder)
        if residual is not None:
            require_residual(residual, given, f"residuals[{index}]", op)
        copied = str(spec) == "none" and small.numel() * small.element_size() >= ALONE_BYTES
        nbytes = large.numel() * large.element_size()
        buffers = Buffers(given, output, residual)
        items.append(Item(small.numel(), small.dtype, spec, buffers, output, nbytes, copied))
    return items


def one_each(codec: Specs, count: int) -> list[str | Codec]:
    """A codec for each of ``count`` tensors: the same for all, or those listed."""
    listed = [codec] * count if isinstance(codec, str | Codec) else list(codec)
    if len(listed) != count:
        raise ValueError(f"codec: {len(listed)} codecs for {count} tensors; give one, or one a tensor")
    return listed


def kept(residuals: Residuals, count: int) -> list[torch.Tensor | None]:
    """A residual, or None, for each of ``count`` tensors."""
    listed: list[torch.Tensor | None] = [None] * count if residuals is None else list(residuals)
    if len(listed) != count:
        raise ValueError(f"residuals: {len(listed)} for {count} tensors; give one (or None) a tensor")
    return listed


def cut(items: Sequence[Item], bucket_bytes: int) -> list[Sequence[Item]]:
    """Neighbours of at most ``bucket_bytes`` together, unless a single tensor is larger; one bucket at the least."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: must be at least 1, got {bucket_bytes}")
    buckets: list[list[Item]] = [[]]
    held = 0
    for item in items:
        last = buckets[-1]
        if last and (held + item.nbytes > bucket_bytes or item.alone or last[-1].alone):
            buckets.append([])
            held = 0
        buckets[-1].append(item)
        held += item.nbytes
    return list(buckets)
