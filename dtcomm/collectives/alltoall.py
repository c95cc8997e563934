"""all_to_all: every rank sends a shard to every rank, of equal sizes or of any sizes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dtcomm.codecs import Codec
from dtcomm.codecs.spec import has_variable_length
from dtcomm.collectives import _encoded
from dtcomm.collectives._call import Call, exchange_splits, run
from dtcomm.collectives._options import Algorithm, Group, Options, documented
from dtcomm.collectives.checks import (
    require_contiguous,
    require_no_overlap,
    require_same_device,
    require_tensor,
)
from dtcomm.runtime.communicator import get_communicator_for
from dtcomm.runtime.plans import run_repeated
from dtcomm.work import Work


@documented(whole="the input")
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

    Example:
        Exchange the tokens of experts::

            received = torch.empty(sum(output_splits), features)
            dtcomm.all_to_all(received, tokens, output_splits, input_splits, codec="fp8_e4m3")
    """
    repeated = None
    if output_splits is None and input_splits is None:
        repeated = (group, input, output, "all_to_all", codec, algorithm, checksum)
        if (done := run_repeated(repeated, async_op, seed, residual)) is not False:
            return done
    options = Options(codec, algorithm, group, async_op, seed, residual, checksum)
    communicator = get_communicator_for(group, output, "output")
    require_exchange(output, input)
    if repeated is not None:
        sent = received = [require_equal_shards(output, input, communicator.size)] * communicator.size
    else:
        sent = _elements(input, input_splits, "input", communicator.size)
        received = _elements(output, output_splits, "output", communicator.size)
    if has_variable_length(codec):
        _encoded.all_to_all(output, input, sent, received, communicator, options)
        return None
    splits = () if repeated is not None else exchange_splits(communicator, sent, received, group)
    return run(communicator, Call("all_to_all", input, output, splits=splits), options, repeated=repeated)


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
