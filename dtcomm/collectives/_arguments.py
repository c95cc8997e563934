"""What is checked before a call starts. Messages name the argument, what was given and what is valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.runtime.types import OPS

Group = dist.ProcessGroup | None
Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType


class ReceiveOptions(TypedDict, total=False):
    """What every call takes by keyword, for the overloads that tell ``async_op=True`` from the rest."""

    codec: str | Codec
    group: Group
    checksum: bool | None


class SendOptions(ReceiveOptions, total=False):
    """The same where this rank encodes, by a way that is given."""

    seed: int | None
    residual: torch.Tensor | None


class Options(SendOptions, total=False):
    """The same of every collective."""

    algorithm: Any


class CoalescedOptions(TypedDict, total=False):
    """The same of the coalesced forms."""

    codec: str | Codec | Sequence[str | Codec]
    algorithm: str
    group: Group
    seed: int | None
    residuals: Sequence[torch.Tensor | None] | None
    bucket_bytes: int
    checksum: bool | None


_TORCH_OPS: dict[Any, str] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


def op_name(op: Any) -> str:
    """The operator's name, given by name or as torch's."""
    if isinstance(op, str) and op in OPS:
        return op
    name = _TORCH_OPS.get(op) if not isinstance(op, str) else None
    if name is None:
        raise ValueError(f"op: {op!r} is not one of {', '.join(OPS)}")
    return name


def require_dtype(op: str, dtype: torch.dtype, codec: Codec) -> None:
    """The codec takes the dtype, and both the operator."""
    if dtype not in codec.dtypes:
        valid = ", ".join(str(valid).removeprefix("torch.") for valid in codec.dtypes)
        raise TypeError(f"tensor: codec {codec} takes {valid}, got {str(dtype).removeprefix('torch.')}")
    if op in ("min", "max") and op not in codec.operations:
        raise ValueError(f"op: {op} goes with codecs none, fp16 and bf16, not with {codec}")
    if op == "avg" and not dtype.is_floating_point:
        raise ValueError(
            f"op: avg needs a floating-point tensor, got {str(dtype).removeprefix('torch.')}; use sum"
        )


def require_auditable(codec: str | Codec) -> None:
    """A codec whose sums can be checked: integers add up without loss, floats do not."""
    if not (isinstance(codec, str) and "/" in codec) and parse(codec).reproducible:
        return
    raise ValueError(
        f"audit: needs a codec whose sums are exact, got {codec}; valid: exact, exact:bits=16, exact:bits=32"
    )


def require_type(tensor: Any, argument: str) -> None:
    """A tensor at all."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{argument}: expected a torch.Tensor, got {type(tensor).__name__}")


def require_tensor(tensor: Any, argument: str) -> None:
    """A dense tensor of a dtype that can be sent."""
    require_type(tensor, argument)
    if tensor.layout is not torch.strided:
        raise ValueError(f"{argument}: expected a dense tensor, got layout {tensor.layout}")
    if tensor.dtype not in ELEMENT_TYPES:
        valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in ELEMENT_TYPES)
        raise TypeError(f"{argument}: dtype {tensor.dtype} is not one of {valid}")


def in_memory(tensor: torch.Tensor, argument: str) -> torch.Tensor:
    """The tensor as a run of memory, which an elementwise reduction may take in any order."""
    if tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous():
        return tensor
    require_tensor(tensor, argument)
    if not tensor.is_cpu and not tensor.is_cuda:
        raise ValueError(f"{argument}: is on {tensor.device}; valid: tensors on the CPU and on CUDA devices")
    if not _is_dense(tensor):
        raise ValueError(
            f"{argument}: expected a dense, non-overlapping tensor, got strides {tuple(tensor.stride())} "
            f"for shape {tuple(tensor.shape)}; pass a contiguous copy"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a run of memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def require_contiguous(tensor: torch.Tensor, argument: str) -> None:
    """Elements in their order, where tensors can be sent from."""
    if not tensor.is_cpu:
        in_memory(tensor, argument)
    if not tensor.is_contiguous():
        raise ValueError(f"{argument}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")


def require_pair(
    output: Any, input: Any, whole: str, ranks: int, names: tuple[str, str] = ("output", "input")
) -> None:
    """``output`` and ``input`` are contiguous and alike; ``whole``, one of the two words, says which holds a shard of
    every rank; errors call them by ``names``.
    """
    require_tensor(output, names[0])
    require_tensor(input, names[1])
    large, small = (output, input) if whole == "output" else (input, output)
    holder, part = names if whole == "output" else names[::-1]
    if input.dtype != output.dtype:
        raise TypeError(f"{holder}: is {large.dtype}, {part} is {small.dtype}; they must be equal")
    if large.numel() != small.numel() * ranks:
        raise ValueError(
            f"{holder}: has {large.numel()} elements; expected world size x {part} = {ranks} x {small.numel()}"
        )
    require_contiguous(output, names[0])
    require_contiguous(input, names[1])
    require_beside(large, small, holder, part)


def require_beside(tensor: torch.Tensor, other: torch.Tensor, argument: str, name: str) -> None:
    """Both on the same device."""
    if not (tensor.is_cpu and other.is_cpu) and tensor.device != other.device:
        raise ValueError(
            f"{argument}: is on {tensor.device}, {name} is on {other.device}; they must be on one device"
        )


def require_residual(residual: Any, tensor: torch.Tensor, argument: str, op: Any = "sum") -> None:
    """An fp32 tensor beside the rank's contribution, whose encoding may lose something that can be made up for."""
    if not isinstance(residual, torch.Tensor) or residual.dtype != torch.float32:
        given = residual.dtype if isinstance(residual, torch.Tensor) else type(residual).__name__
        raise TypeError(f"{argument}: expected a float32 tensor, got {given}")
    if residual.numel() != tensor.numel():
        raise ValueError(f"{argument}: has {residual.numel()} elements, the tensor {tensor.numel()}")
    if op_name(op) not in ("sum", "avg"):
        raise ValueError(f"{argument}: error feedback goes with sum and avg, not with {op_name(op)}")
    if not tensor.is_floating_point():
        raise TypeError(f"{argument}: error feedback needs a floating-point tensor, got {tensor.dtype}")
    require_contiguous(residual, argument)
    require_beside(residual, tensor, argument, "the tensor")
    require_apart(tensor, residual, None, argument, "the tensor")


def require_apart(
    whole: torch.Tensor, part: torch.Tensor, offset: int | None, argument: str, other: str
) -> None:
    """Two tensors share no memory, unless ``part`` is the shard of ``whole`` at element ``offset``."""
    begin, end = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
    low, high = whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size()
    if begin >= high or end <= low or begin == end or low == high:
        return
    if offset is None or begin != low + offset * whole.element_size():
        where = "" if offset is None else " other than this rank's shard of it"
        raise ValueError(f"{argument}: overlaps the memory of {other}{where}")


def require_shards(shards: Any, tensor: torch.Tensor, argument: str, ranks: int) -> None:
    """One shard like ``tensor`` for every rank: a sequence of tensors, or one tensor that holds them all."""
    if isinstance(shards, torch.Tensor):
        require_tensor(shards, argument)
        listed, expected = [(argument, shards)], tensor.numel() * ranks
    elif isinstance(shards, Sequence) and not isinstance(shards, str):
        if len(shards) != ranks:
            raise ValueError(f"{argument}: has {len(shards)} tensors, the group {ranks} ranks")
        listed, expected = [(f"{argument}[{i}]", shard) for i, shard in enumerate(shards)], tensor.numel()
    else:
        raise TypeError(f"{argument}: expected a tensor or a list of tensors, got {type(shards).__name__}")
    for name, shard in listed:
        require_tensor(shard, name)
        if shard.dtype != tensor.dtype:
            raise TypeError(f"{name}: is {shard.dtype}, tensor is {tensor.dtype}; they must be equal")
        if shard.numel() != expected:
            raise ValueError(f"{name}: has {shard.numel()} elements, expected {expected}")
        require_contiguous(shard, name)
        require_beside(shard, tensor, name, "tensor")
