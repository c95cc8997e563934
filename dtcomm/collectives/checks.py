"""Argument checks of the collectives.

Every public function of `dtcomm.collectives` calls these before anything starts. Messages name the argument, what was
given and what is valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec, parse_levels
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.runtime.types import OPS

_TORCH_OPS: dict[Any, str] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


def op_name(op: Any) -> str:
    """Return the name of a reduction given by name or as torch's ``ReduceOp``."""
    if isinstance(op, str) and op in OPS:
        return op
    name = _TORCH_OPS.get(op) if not isinstance(op, str) else None
    if name is None:
        raise ValueError(f"op: {op!r} is not one of {', '.join(OPS)}")
    return name


def require_dtype(op: str, dtype: torch.dtype, codec: Codec) -> None:
    """Check that the codec accepts the dtype, and that both accept the reduction."""
    if dtype not in codec.dtypes:
        valid = ", ".join(_dtype_name(dtype) for dtype in codec.dtypes)
        why = (
            ": integers of 32 bits do not hold its digits"
            if codec.reproducible and dtype.itemsize == 8
            else ""
        )
        raise TypeError(f"tensor: codec {codec} takes {valid}, got {_dtype_name(dtype)}{why}")
    if op in ("min", "max") and op not in codec.operations:
        raise ValueError(f"op: {op} is valid with codecs none, fp16 and bf16, got {codec}")
    if op == "avg" and not dtype.is_floating_point:
        raise ValueError(f"op: avg needs a floating-point tensor, got {_dtype_name(dtype)}; use sum")


def require_auditable(spec: str | Codec) -> None:
    """Check that the codec's sums can be audited: integers add up without error, floats do not."""
    inside, between = parse_levels(spec)
    if between is not None or not inside.reproducible or inside.lossless(torch.float32):
        raise ValueError(
            f"audit: needs a codec whose sums are exact, got {spec}; valid: exact, exact:bits=16, exact:bits=32"
        )


def require_type(tensor: Any, argument: str) -> None:
    """Check that the argument is a tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{argument}: expected a torch.Tensor, got {type(tensor).__name__}")


def require_tensor(tensor: Any, argument: str) -> None:
    """Check that the argument is a dense tensor of a dtype that can be sent, in memory of its own."""
    require_type(tensor, argument)
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{argument}: expected a dense tensor, got layout {tensor.layout}; pass {argument}.to_dense(). Only "
            "dtcomm.all_reduce takes sparse tensors, those of layout torch.sparse_coo"
        )
    if tensor.dtype not in ELEMENT_TYPES:
        valid = ", ".join(map(_dtype_name, ELEMENT_TYPES))
        raise TypeError(f"{argument}: dtype {tensor.dtype} is not one of {valid}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{argument}: is a lazy view; pass {argument}.resolve_conj().resolve_neg()")
    if tensor.numel() and not tensor.is_meta and not has_memory(tensor):
        raise TypeError(
            f"{argument}: a {type(tensor).__name__} without memory of its own cannot be sent; pass the tensor that it "
            f"wraps, as {argument}.to_local() of a DTensor"
        )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own: wrappers (DTensor), fake and freed tensors have none."""
    try:
        return tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() != 0
    except RuntimeError:  # torch refuses to say where a tensor without storage lies
        return False


def in_memory(tensor: torch.Tensor, argument: str) -> torch.Tensor:
    """Return the tensor in memory order, as a contiguous tensor; elementwise reductions may take any order.

    TypeError if it is not a tensor, or of a dtype that cannot be sent; ValueError if the elements overlap or leave
    gaps, or the device is neither the CPU nor CUDA.
    """
    require_tensor(tensor, argument)
    if tensor.is_cpu and tensor.is_contiguous():
        return tensor
    if not tensor.is_cpu and not tensor.is_cuda:
        raise ValueError(f"{argument}: is on {tensor.device}; valid: tensors on the CPU and on CUDA devices")
    if not _is_dense(tensor):
        raise ValueError(
            f"{argument}: expected a dense, non-overlapping tensor, got strides {tuple(tensor.stride())} "
            f"for shape {tuple(tensor.shape)}; pass a contiguous copy"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a range of memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def require_contiguous(tensor: torch.Tensor, argument: str) -> None:
    """Check that the tensor is contiguous and on a device that can be sent from."""
    if not tensor.is_cpu:
        in_memory(tensor, argument)
    if not tensor.is_contiguous():
        raise ValueError(f"{argument}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")


def require_pair(
    output: Any, input: Any, whole: str, ranks: int, names: tuple[str, str] = ("output", "input")
) -> None:
    """Check that output and input are contiguous, alike, and that one holds a shard for every rank.

    That one is ``whole``, ``"output"`` or ``"input"``; ``names`` are what errors call the two.
    """
    require_tensor(output, names[0])
    require_tensor(input, names[1])
    large, small = (output, input) if whole == "output" else (input, output)
    large_name, small_name = names if whole == "output" else names[::-1]
    if input.dtype != output.dtype:
        raise TypeError(f"{large_name}: is {large.dtype}, {small_name} is {small.dtype}; they must be equal")
    if large.numel() != small.numel() * ranks:
        raise ValueError(
            f"{large_name}: has {large.numel()} elements; "
            f"expected world size x {small_name} = {ranks} x {small.numel()}"
        )
    require_contiguous(output, names[0])
    require_contiguous(input, names[1])
    require_same_device(large, small, large_name, small_name)


def require_same_device(tensor: torch.Tensor, other: torch.Tensor, argument: str, other_name: str) -> None:
    """Check that both tensors are on the same device."""
    if not (tensor.is_cpu and other.is_cpu) and tensor.device != other.device:
        raise ValueError(
            f"{argument}: is on {tensor.device}, {other_name} is on {other.device}; they must be on one device"
        )


def require_residual(residual: Any, tensor: torch.Tensor, argument: str, op: Any = "sum") -> None:
    """Check the residual of a tensor: fp32, of its size, in other memory, for a floating-point sum or average."""
    if not isinstance(residual, torch.Tensor) or residual.dtype != torch.float32:
        actual = residual.dtype if isinstance(residual, torch.Tensor) else type(residual).__name__
        raise TypeError(f"{argument}: expected a float32 tensor, got {actual}")
    if residual.numel() != tensor.numel():
        raise ValueError(f"{argument}: has {residual.numel()} elements, the tensor {tensor.numel()}")
    if op_name(op) not in ("sum", "avg"):
        raise ValueError(f"{argument}: error feedback is valid with sum and avg, got op {op_name(op)}")
    if not tensor.is_floating_point():
        raise TypeError(f"{argument}: error feedback needs a floating-point tensor, got {tensor.dtype}")
    require_contiguous(residual, argument)
    require_same_device(residual, tensor, argument, "the tensor")
    require_no_overlap(tensor, residual, None, argument, "the tensor")


def require_no_overlap(
    tensor: torch.Tensor, part: torch.Tensor, offset: int | None, argument: str, other_name: str
) -> None:
    """Check that two tensors share no memory, unless ``part`` is the shard of ``tensor`` at element ``offset``."""
    begin, end = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
    low, high = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    if begin >= high or end <= low or begin == end or low == high:
        return
    if offset is None or begin != low + offset * tensor.element_size():
        exception = "" if offset is None else " other than this rank's shard of it"
        raise ValueError(f"{argument}: overlaps the memory of {other_name}{exception}")


def require_shards(shards: Any, tensor: torch.Tensor, argument: str, ranks: int) -> None:
    """Check that there is one shard like ``tensor`` for every rank: a sequence, or one tensor that holds them all."""
    if isinstance(shards, torch.Tensor):
        require_tensor(shards, argument)
        named, expected = [(argument, shards)], tensor.numel() * ranks
    elif isinstance(shards, Sequence) and not isinstance(shards, str):
        if len(shards) != ranks:
            raise ValueError(f"{argument}: has {len(shards)} tensors, the group {ranks} ranks")
        named, expected = [(f"{argument}[{i}]", shard) for i, shard in enumerate(shards)], tensor.numel()
    else:
        raise TypeError(f"{argument}: expected a tensor or a list of tensors, got {type(shards).__name__}")
    for name, shard in named:
        require_tensor(shard, name)
        if shard.dtype != tensor.dtype:
            raise TypeError(f"{name}: is {shard.dtype}, tensor is {tensor.dtype}; they must be equal")
        if shard.numel() != expected:
            raise ValueError(f"{name}: has {shard.numel()} elements, expected {expected}")
        require_contiguous(shard, name)
        require_same_device(shard, tensor, name, "tensor")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
