"""all_to_all: every rank has something for every rank, in equal shards or in shards of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch

from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import (
    Group,
    Options,
    require_apart,
    require_beside,
    require_contiguous,
    require_residual,
    require_tensor,
)
from dtcomm.collectives._dispatch import Algorithm, plan_for, start
from dtcomm.collectives.gather_ops import all_gather
from dtcomm.errors import CollectiveMismatch
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.communicator_cache import get_communicator_for
from dtcomm.runtime.types import Buffers
from dtcomm.runtime.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work: ...


@overload
def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None: ...


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Send shard i of ``input`` to rank i, and take rank i's as shard i of ``output``; both contiguous.

    Without splits all shards are equal. With them, ``input_splits[i]`` rows (along dimension 0) go to rank i and
    ``output_splits[i]`` come from it; None for one of the two means equal rows. All ranks of the group give splits
    or none does: with splits the ranks tell each other the sizes first, so the call returns only when all have
    made it, ``async_op`` or not. A rank's shard for itself is never sent, so it arrives as it is with every codec.
    Raises CollectiveMismatch, on all ranks, where a rank expects another size than is sent.
    """
    communicator = get_communicator_for(group, output, "output")
    require_tensor(output, "output")
    require_tensor(input, "input")
    if input.dtype != output.dtype:
        raise TypeError(f"output: is {output.dtype}, input is {input.dtype}; they must be equal")
    require_contiguous(output, "output")
    require_contiguous(input, "input")
    require_beside(output, input, "output", "input")
    require_apart(input, output, None, "output", "input")
    if residual is not None:
        require_residual(residual, input, "residual")
    splits: tuple[int, ...] = ()
    if output_splits is None and input_splits is None:
        numel = _equal_shards(output, input, communicator.size)
    else:
        sent = _elements(input, input_splits, "input", communicator.size)
        received = _elements(output, output_splits, "output", communicator.size)
        splits = _tell(communicator, sent, received, group)
        numel = max(splits)
    key = ("all_to_all", numel, input.dtype, codec, algorithm, checksum)
    kept, plan = communicator.plans.get(key, (None, None))
    if kept != splits:  # sizes that change from call to call: one plan is enough
        plan = plan_for(
            communicator,
            key,
            "all_to_all",
            "sum",
            [numel],
            [input.dtype],
            [codec],
            algorithm,
            splits=splits,
            checksum=checksum,
        )
        communicator.plans[key] = (splits, plan)
    return start(communicator, plan, [Buffers(input, output, residual)], [output], seed, async_op)


def _equal_shards(output: torch.Tensor, input: torch.Tensor, ranks: int) -> int:
    if input.numel() != output.numel():
        raise ValueError(
            f"output: has {output.numel()} elements, input {input.numel()}; without splits they are equal"
        )
    if input.numel() % ranks:
        raise ValueError(
            f"input: has {input.numel()} elements, which do not divide into {ranks} equal shards; give splits"
        )
    return input.numel() // ranks


def _elements(tensor: torch.Tensor, splits: Sequence[int] | None, name: str, ranks: int) -> list[int]:
    """The elements of each shard."""
    if tensor.dim() == 0:
        raise ValueError(f"{name}: a tensor without dimensions has no rows to split")
    rows = tensor.shape[0]
    if splits is None:
        if rows % ranks:
            raise ValueError(f"{name}: has {rows} rows, which do not divide equally over {ranks} ranks")
        splits = [rows // ranks] * ranks
    if len(splits) != ranks:
        raise ValueError(f"{name}_splits: has {len(splits)} entries, the group {ranks} ranks")
    if min(splits) < 0 or sum(splits) != rows:
        raise ValueError(f"{name}_splits: {list(splits)} do not add up to the {rows} rows of {name}")
    width = tensor.numel() // rows if rows else 0
    return [split * width for split in splits]


def _tell(communicator: Communicator, sent: list[int], received: list[int], group: Group) -> tuple[int, ...]:
    """What every rank sends to every rank, sender * ranks + receiver."""
    ranks = communicator.size
    said = torch.empty(ranks, 2, ranks, dtype=torch.int64)
    all_gather(said, torch.tensor([sent, received]), group=group)
    for src in range(ranks):
        for dst in range(ranks):
            given, expected = int(said[src, 0, dst]), int(said[dst, 1, src])
            if given != expected:
                raise CollectiveMismatch(
                    f"rank {communicator.ranks[src]} sends {given} elements to rank {communicator.ranks[dst]}, "
                    f"which expects {expected}: input_splits of the one, output_splits of the other"
                )
    return tuple(said[:, 0].flatten().tolist())
