"""Parts of tensors: what a process holds of each, and where it lies in the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtcomm import _C

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape


class Slice(NamedTuple):
    """A part of a tensor: what a rank holds of it.

    Attributes:
        tensor: The part.
        shape: The shape of the whole tensor.
        offset: Where the part begins in it, one index for each dimension.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


State: TypeAlias = Mapping[str, "Tensor | Slice"]


def slices_of(weights: Tensor | State) -> dict[str, Slice]:
    """Return by name what this process holds of each tensor; a single tensor has the name ``""``."""
    named: State = {"": weights} if isinstance(weights, Tensor) else weights
    slices = {}
    for name, value in named.items():
        if isinstance(value, DTensor):
            sharded: Any = value.detach()
            local, boxes = sharded.to_local(), sharded.__create_chunk_list__()
            if (
                len(boxes) != 1
                or tuple(boxes[0].sizes) != tuple(local.shape)
                or any(placement.is_partial() for placement in value.placements)
            ):
                raise ValueError(
                    f"tensor {name!r}: {value.placements}: expected one box of the tensor on each rank"
                )
            slices[name] = Slice(local, tuple(value.shape), tuple(boxes[0].offsets))
        elif isinstance(value, Tensor):
            slices[name] = Slice(value.detach(), tuple(value.shape), (0,) * value.dim())
        elif isinstance(value, Slice):
            slices[name] = value
    return slices


def checksum(tensor: Tensor) -> int:
    """Return the CRC32C of the bytes of a contiguous CPU tensor."""
    return _C.crc32c(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else 0


def on_cpu(tensor: Tensor) -> Tensor:
    """Return the tensor if it is contiguous and on the CPU, else such a copy."""
    return tensor.detach().to("cpu").contiguous()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, in its memory."""
    return tensor.view(-1).view(torch.uint8)


def box_of(part: Slice) -> Box:
    return part.offset, tuple(part.tensor.shape)


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes share; None if nothing."""
    if one == other:
        return one
    begin = tuple(map(max, one[0], other[0]))
    shape = tuple(
        min(at + extent, to + size) - start
        for at, extent, to, size, start in zip(*one, *other, begin, strict=True)
    )
    return (begin, shape) if all(size > 0 for size in shape) else None


def any_overlap(boxes: Sequence[Box]) -> bool:
    ordered = sorted(boxes)  # by their first index, so that most pairs are skipped
    for number, box in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if box[0] and other[0][0] >= box[0][0] + box[1][0]:
                break
            if overlap(box, other):
                return True
    return False


def inside_of(tensor: Tensor, box: Box, origin: Sequence[int]) -> Tensor:
    """Return the view of a box of a tensor that begins at ``origin``."""
    for dim, (at, size, start) in enumerate(zip(*box, origin, strict=True)):
        tensor = tensor.narrow(dim, at - start, size)
    return tensor
