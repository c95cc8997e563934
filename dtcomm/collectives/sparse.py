"""all_reduce of sparse tensors: the ranks exchange which entries they have, and sum the values of all of these densely.

A sum has three stages, each one collective:

1. The ranks gather the numbers of their entries, with their shapes and dtypes, which they compare.
2. They gather the positions of their entries: one integer for each, int32 where the sparse dimensions have fewer than
   2**31 positions, else int64. All ranks now know the union of the positions.
3. Every rank writes its values into a dense tensor that has one row for each position of the union, and zeros where it
   has no entry. An ordinary all_reduce sums these tensors, with the caller's codec.

The union never has more rows than the dense tensor, so no sum sends more values than that of the dense tensors would;
the positions come on top. There is one way for all sizes: no count changes the bits of a result. Positions that all
ranks share are sent once in a sum, and not once for each rank as where values are gathered; where ranks share none,
gathering would send up to half as many values.

The lengths of a stage depend on the stage before it, so a call waits for the first two; the third may be
asynchronous. `dtcomm.ddp` runs the same stages for sparse gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from dtcomm import torch_compat
from dtcomm.codecs import Codec, parse_levels
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.codecs.cast import RoundedExact
from dtcomm.codecs.spec import require_fixed_length
from dtcomm.collectives._call import Call, run_internal
from dtcomm.collectives._options import Group, Op, Options
from dtcomm.collectives.checks import op_name, require_auditable, require_dtype
from dtcomm.collectives.planning import require_algorithm
from dtcomm.errors import CollectiveMismatch
from dtcomm.runtime.communicator import get_communicator_for
from dtcomm.streams import record_streams
from dtcomm.work import CompositeWork, Work

MAX_DIMENSIONS = 16
_DTYPES = {number: dtype for dtype, number in ELEMENT_TYPES.items()}

Stages = Generator[Work, None, None]
SumRows = Callable[[Tensor], Work]  # starts the dense sum of stage 3, in place


def all_reduce(tensor: Tensor, op: Op, options: Options) -> Work | None:
    """`dtcomm.all_reduce` of a sparse COO tensor."""
    inside, between = _require_supported(tensor, op, options)
    require_algorithm(options.algorithm, options.group)
    if options.algorithm == "auto" and (between is None or between == inside):
        # "auto" may choose a ring, which does not add in rank order
        options = options._replace(algorithm="direct")

    def sum_rows(rows: Tensor) -> Work:
        work = run_internal(Call("all_reduce", rows, rows, op), options._replace(async_op=True))
        assert work is not None  # because of async_op
        return work

    work = start_stages(sum_stages(tensor, sum_rows, options.group, options.checksum), tensor)
    if options.async_op:
        return work
    work.wait()
    return None


def start_stages(stages: Stages, tensor: Tensor) -> Work:
    """Run the first two stages, start the third, and return the handle of all; it ends when ``tensor`` is written."""
    works: list[Work] = []
    for _ in range(2):
        works.append(next(stages))
        works[-1].wait()
    works.append(next(stages))
    return CompositeWork(works, [tensor], lambda: next(stages, None))


def sum_stages(tensor: Tensor, sum_rows: SumRows, group: Group, checksum: bool | None = None) -> Stages:
    """Sum a sparse tensor over ranks in place: yield the collective of each stage, and continue when it is complete.

    The tensor, coalesced or not, becomes the coalesced sum. ``sum_rows`` starts the sum of a dense tensor, [positions
    of the union, *dense dimensions], in place. CollectiveMismatch if the ranks' tensors have different shapes, numbers
    of sparse dimensions or dtypes.
    """
    entries = tensor.detach().coalesce()
    indices, values = torch_compat.sparse_parts(entries)
    shape, sparse_shape = tuple(entries.shape), tuple(entries.shape[: entries.sparse_dim()])
    positions = _positions(indices, sparse_shape)
    description = [positions.numel(), ELEMENT_TYPES[entries.dtype], len(sparse_shape), len(shape), *shape]
    description += [0] * (4 + MAX_DIMENSIONS - len(description))
    announced = torch.tensor(description, device=tensor.device)
    ranks = get_communicator_for(group, tensor, "tensor").size

    descriptions = announced.new_empty(ranks, announced.numel())
    yield _gather(descriptions, announced, group, checksum, "counts of a sparse all_reduce")
    counts = _agreed_counts(descriptions.tolist(), description)

    most = max(counts)
    padded = positions.new_zeros(most)
    padded[: positions.numel()] = positions
    gathered = padded.new_empty(ranks, most)
    yield _gather(gathered, padded, group, checksum, "positions of a sparse all_reduce")
    union = torch.unique(torch.cat([row[:count] for row, count in zip(gathered, counts, strict=True)]))

    rows = values.new_zeros(union.numel(), *values.shape[1:])
    rows[torch.searchsorted(union, positions)] = values
    yield sum_rows(rows)
    record_streams(union, rows)  # this part may run on another stream
    indices = _coordinates(union.long(), sparse_shape)
    with torch.no_grad():
        tensor.copy_(torch.sparse_coo_tensor(indices, rows, shape, check_invariants=False, is_coalesced=True))


def _require_supported(tensor: Tensor, op: Op, options: Options) -> tuple[Codec, Codec | None]:
    """Return the codecs of a call; raise for what a sparse tensor does not go with."""
    if not tensor.is_cpu and not tensor.is_cuda:
        raise ValueError(f"tensor: is on {tensor.device}; valid: tensors on the CPU and on CUDA devices")
    if tensor.dtype not in ELEMENT_TYPES:
        valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in ELEMENT_TYPES)
        raise TypeError(f"tensor: dtype {tensor.dtype} is not one of {valid}")
    if tensor.dim() > MAX_DIMENSIONS:
        raise ValueError(
            f"tensor: has {tensor.dim()} dimensions; a sparse tensor may have up to {MAX_DIMENSIONS}"
        )
    if op_name(op) not in ("sum", "avg"):
        raise ValueError(
            f"op: {op_name(op)} is valid with dense tensors; a sparse tensor takes sum and avg, to which an entry that "
            "a rank does not have contributes zero"
        )
    if options.residual is not None:
        raise ValueError(
            "residual: error feedback is valid with dense tensors: the entries of a sparse tensor change from call to "
            "call; pass None"
        )
    if options.epilogue is not None:
        raise ValueError("epilogue: is valid with dense tensors; pass None")
    inside, between = parse_levels(options.codec)
    for codec in (inside, between or inside):
        require_fixed_length(codec, "all_reduce")
        require_dtype(op_name(op), tensor.dtype, codec)
    if options.audit:
        require_auditable(options.codec)
    if isinstance(inside, RoundedExact) and not tensor.is_coalesced():
        raise ValueError(
            f"tensor: is not coalesced, and {inside} rounds once, so it takes no sums that coalesce() has rounded; "
            "valid: a coalesced tensor"
        )
    return inside, between


def _gather(output: Tensor, input: Tensor, group: Group, checksum: bool | None, purpose: str) -> Work:
    """Start an all_gather that has a name of its own in errors, where another rank calls something else."""
    call = Call("all_gather", input, output, purpose=purpose)
    work = run_internal(call, Options(group=group, async_op=True, checksum=checksum))
    assert work is not None  # because it is asynchronous
    return work


def _agreed_counts(descriptions: Sequence[Sequence[int]], own: Sequence[int]) -> list[int]:
    """Return the number of entries of each rank; raise if a tensor is of another shape or dtype than this rank's."""
    for rank, description in enumerate(descriptions):
        if list(description[1:]) != list(own[1:]):
            raise CollectiveMismatch(
                f"sparse all_reduce: rank {rank} of the group has {_describe(description)}, this rank has "
                f"{_describe(own)}; they must be equal"
            )
    return [description[0] for description in descriptions]


def _describe(description: Sequence[int]) -> str:
    _, dtype, sparse_dimensions, dimensions, *sizes = description
    name = str(_DTYPES[dtype]).removeprefix("torch.")
    return f"a {name} tensor of shape {tuple(sizes[:dimensions])} with {sparse_dimensions} sparse dimensions"


def _positions(indices: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the positions of entries, [entries], from their coordinates, [dimensions, entries]."""
    positions = indices.new_zeros(indices.shape[1])
    for coordinates, size in zip(indices, shape, strict=True):
        positions = positions * size + coordinates
    return positions.to(torch.int32) if math.prod(shape) < 2**31 else positions


def _coordinates(positions: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the coordinates of entries, the inverse of `_positions`."""
    coordinates = positions.new_empty(len(shape), positions.numel())
    for dimension in range(len(shape) - 1, -1, -1):
        size = max(shape[dimension], 1)  # a dimension without elements has no entries
        coordinates[dimension] = positions % size
        positions = positions // size
    return coordinates
