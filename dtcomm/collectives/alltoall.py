"""all_to_all: every rank sends a shard to every rank, of equal sizes or of any sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from dtcomm.codecs import Codec
from dtcomm.collectives import _variable_length
from dtcomm.collectives._arguments import (
    Algorithm,
    Group,
    Options,
    require_contiguous,
    require_no_overlap,
    require_residual,
    require_same_device,
    require_tensor,
)
from dtcomm.collectives._dispatch import PlanOfSplits, make_plan, start
from dtcomm.collectives.gather_ops import all_gather
from dtcomm.errors import CollectiveMismatch
from dtcomm.runtime import warm_calls
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.communicator_cache import get_communicator_for
from dtcomm.runtime.types import Buffers
from dtcomm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def all_to_all(
    output: Tensor,
    input: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work: ...


@overload
def all_to_all(
    output: Tensor,
    input: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None: ...


def all_to_all(
    output: Tensor,
    input: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Send a shard of the input to every rank, and receive one from every rank.

    Shard i of ``input`` goes to rank i, and rank i's shard becomes shard i of ``output``. A rank's shard for itself is
    never sent, so it arrives unchanged with every codec.

    Args:
        output: The received shards in rank order, contiguous.
        input: The shards to send in rank order, contiguous, of the dtype of ``output``.
        output_splits: The rows (along dimension 0) that come from each rank; None means equal rows.
        input_splits: The rows that go to each rank; None means equal rows. Either all ranks of the group pass splits or
            none does. With splits the ranks exchange the sizes first, so the call returns only when all ranks have made
            it, even with ``async_op``.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or ``"A/B"`` with codec A
            inside hosts and B between them.
        algorithm: The algorithm's name, one of ``dtcomm.algorithms.available("all_to_all")``; ``"direct"`` for the one
            or two shots that suit the codec; ``"auto"`` for the fastest by prediction or measurement; or a
            `dtcomm.schedule.Schedule`, or its text, for the ranks of the group.
        group: The process group; None is the default group.
        async_op: If True, start the operation and return a ``Work`` at once. The tensors must not be used until the
            work is done.
        seed: The key of stochastic rounding and of random positions, the same on all ranks; None is the number of the
            call.
        residual: Error feedback: an fp32 tensor with as many elements as ``input``. It is added to this rank's
            contribution and then overwritten with the error of encoding it. None means no feedback.
        checksum: If True, every payload travels with its CRC32C, which the receiver verifies. None takes the value of
            the variable DTCOMM_CHECKSUM. It is the same on all ranks.

    Returns:
        None when the result is complete, or a ``Work`` if ``async_op``.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it; nothing has been started.
        CollectiveMismatch: If the ranks call different operations, or a rank expects another size than is sent.
        CollectiveTimeout: If a rank does not take part within the group's timeout.
        PeerLost: If a rank died.
        PayloadCorrupt: If a checksum does not match.

    Example:
        Exchange the tokens of experts::

            received = torch.empty(sum(output_splits), features)
            dtcomm.all_to_all(received, tokens, output_splits, input_splits, codec="fp8_e4m3")
    """
    warm = None
    if seed is None and residual is None and output_splits is None and input_splits is None:
        warm = ("all_to_all", group, input, output, codec, algorithm, checksum)
        if started := warm_calls.start(warm, async_op):
            return started if async_op else None
    communicator = get_communicator_for(group, output, "output")
    require_exchange(output, input)
    if residual is not None:
        require_residual(residual, input, "residual")
    splits: tuple[int, ...] = ()
    if _variable_length.has_variable_length(codec):
        if output_splits is None and input_splits is None:
            sent = received = [require_equal_shards(output, input, communicator.size)] * communicator.size
        else:
            sent = _elements(input, input_splits, "input", communicator.size)
            received = _elements(output, output_splits, "output", communicator.size)
        _variable_length.all_to_all(
            output, input, sent, received, codec, algorithm, group, async_op, residual, checksum
        )
        return None
    if output_splits is None and input_splits is None:
        numel = require_equal_shards(output, input, communicator.size)
    else:
        sent = _elements(input, input_splits, "input", communicator.size)
        received = _elements(output, output_splits, "output", communicator.size)
        splits = _exchange_splits(communicator, sent, received, group)
        numel = max(splits)
    key = ("all_to_all", bool(splits), numel, input.dtype, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None or (isinstance(plan, PlanOfSplits) and plan.splits != splits):
        plan = make_plan(
            communicator,
            key,
            "all_to_all",
            [(numel, input.dtype, codec)],
            algorithm,
            splits=splits,
            checksum=checksum,
        )
    buffers = [Buffers(input, output, residual)]
    return start(communicator, plan, buffers, [output], seed, async_op, warm=warm)


def require_exchange(output: Tensor, input: Tensor) -> None:
    """Check the tensors of an all_to_all as far as that does not depend on splits."""
    require_tensor(output, "output")
    require_tensor(input, "input")
    if input.dtype != output.dtype:
        raise TypeError(f"output: is {output.dtype}, input is {input.dtype}; they must be equal")
    require_contiguous(output, "output")
    require_contiguous(input, "input")
    require_same_device(output, input, "output", "input")
    require_no_overlap(input, output, None, "output", "input")


def require_equal_shards(output: Tensor, input: Tensor, ranks: int) -> int:
    """Return the elements of a shard of an all_to_all without splits; ValueError if the shards are not equal."""
    if input.numel() != output.numel():
        raise ValueError(
            f"output: has {output.numel()} elements, input {input.numel()}; without splits they are equal"
        )
    if input.numel() % ranks:
        raise ValueError(
            f"input: has {input.numel()} elements, which do not divide into {ranks} equal shards; give splits"
        )
    return input.numel() // ranks


def _elements(tensor: Tensor, splits: Sequence[int] | None, name: str, ranks: int) -> list[int]:
    """Return the elements of each shard."""
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


def _exchange_splits(
    communicator: Communicator, sent: list[int], received: list[int], group: Group
) -> tuple[int, ...]:
    """Return the elements that every rank sends to every rank, at index sender * ranks + receiver."""
    ranks = communicator.size
    gathered = torch.empty(ranks, 2 * ranks, dtype=torch.int64)
    all_gather(gathered, torch.tensor(sent + received), group=group)
    sizes = gathered.tolist()  # of each rank what it sends to every rank, and what it expects of every rank
    for src in range(ranks):
        for dst in range(ranks):
            size, expected = sizes[src][dst], sizes[dst][ranks + src]
            if size != expected:
                raise CollectiveMismatch(
                    f"rank {communicator.ranks[src]} sends {size} elements to rank {communicator.ranks[dst]}, "
                    f"which expects {expected}: input_splits of the sender and output_splits of the receiver differ"
                )
    return tuple(size for row in sizes for size in row[:ranks])
