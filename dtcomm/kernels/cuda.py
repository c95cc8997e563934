"""The CUDA kernels (csrc/cuda), which compile the CPU's scalar rules (csrc/codec) and give the same bytes.

Work is queued on the current stream of the tensors' device, as one kernel or as copies. The host never waits for it,
and a CUDA graph may capture it. Callers have checked the tensors: contiguous, of the right size, on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtcomm import _cuda
from dtcomm.codecs import Codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels.calls import OPERATIONS, CallGroup, Combine, Runner, Tensors, address

Ranges = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]  # a SumRange of local_tasks


def combine(call: Combine) -> None:
    """Run one call (see :class:`Combine`) whose tensors are on a CUDA device.

    Raises ValueError for a payload that is not aligned to 16 bytes, and for more than 16 payloads during graph
    capture: their addresses are copied to the device from memory that the graph could not keep alive.
    """
    device = _device_of(call.payload_out, call.out, call.local, *call.payloads, call.residual)
    dtype = ELEMENT_TYPES[call.dtype]
    residual = address(call.residual)
    payloads = [payload.data_ptr() for payload in call.payloads]
    with torch.cuda.device(device):
        table = _table(payloads, device)
        _cuda.combine(
            call.codec.native(),
            payloads,
            address(table),
            call.position,
            address(call.local),
            dtype if call.local is None else ELEMENT_TYPES[call.local.dtype],
            residual,
            residual,
            call.numel,
            call.divisor,
            OPERATIONS[call.op],
            call.key,
            call.offset,
            address(call.payload_out),
            address(call.out),
            dtype,
            dtype if call.out is None else ELEMENT_TYPES[call.out.dtype],
            torch.cuda.current_stream(device).cuda_stream,
        )


def decode(codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    """`out` <- the `numel` elements of the payload; `dtype` is the element type that ``none`` has there."""
    device = _device_of(payload, out)
    with torch.cuda.device(device):
        _cuda.decode(
            codec.native(),
            payload.data_ptr(),
            numel,
            ELEMENT_TYPES[dtype],
            out.data_ptr(),
            ELEMENT_TYPES[out.dtype],
            torch.cuda.current_stream(device).cuda_stream,
        )


def prepare(group: CallGroup, device: torch.device) -> Runner | None:
    """Return what runs the group, with one launch for all calls that the same kernel serves."""
    if any(len(call.payloads) > _cuda.INLINE_PAYLOADS for call in group.calls):
        return None  # their addresses would have to be copied to the device
    calls = _cuda.GroupedCalls(*group.native())

    def run(tensors: Tensors, seed: int) -> None:
        with torch.cuda.device(device):
            calls.run(tensors.addresses, seed, torch.cuda.current_stream(device).cuda_stream)

    return run


def orthonormalize(vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
    """:func:`dtcomm.kernels.low_rank.orthonormalize_all`, in one launch per 64 tensors."""
    device = _device_of(*vectors)
    arguments = [(tensor.data_ptr(), *_shape(tensor), key) for tensor, key in zip(vectors, keys, strict=True)]
    with torch.cuda.device(device):
        _cuda.orthonormalize(arguments, torch.cuda.current_stream(device).cuda_stream)


def factors_finite(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> torch.Tensor:
    """:func:`dtcomm.kernels.low_rank.factors_finite`, in one launch per 64 matrices."""
    device = _device_of(*lefts, *rights)
    results = torch.empty(len(lefts), dtype=torch.bool, device=device)
    arguments = [
        (left.data_ptr(), right.data_ptr(), left.numel(), right.numel(), results.data_ptr() + at)
        for at, (left, right) in enumerate(zip(lefts, rights, strict=True))
    ]
    with torch.cuda.device(device):
        _cuda.check_finite(arguments, torch.cuda.current_stream(device).cuda_stream)
    return results


def expand(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    finite: torch.Tensor | None = None,
) -> None:
    """:func:`dtcomm.kernels.low_rank.expand` in one launch."""
    device = _device_of(gradient, residual, left, right, finite)
    (rank, rows), (_, columns) = _shape(left), _shape(right)
    with torch.cuda.device(device):
        _cuda.expand(
            gradient.data_ptr(),
            ELEMENT_TYPES[gradient.dtype],
            address(residual),
            rows,
            columns,
            rank,
            left.data_ptr(),
            right.data_ptr(),
            address(finite),
            torch.cuda.current_stream(device).cuda_stream,
        )


def measure_digits(x: torch.Tensor, to: Ranges, finite_only: bool) -> None:
    """:func:`dtcomm.kernels.local_tasks.measure_digits` in one launch."""
    _queue(_cuda.measure_digits, x, ELEMENT_TYPES[x.dtype], x.numel(), finite_only, *to[1:3])


def ends_of_digits(agreed: Ranges) -> torch.Tensor:
    """For each block how many times sixteen integers the digits of all blocks up to it are, int64."""
    halves = torch.empty_like(agreed[1], dtype=torch.int32)
    _queue(_cuda.count_digits, *agreed[:3], halves.numel(), halves)
    return halves.cumsum(0)


def split_digits(agreed: Ranges, x: torch.Tensor, digits: torch.Tensor, offsets: Sequence[int]) -> None:
    """:func:`dtcomm.kernels.local_tasks.split_digits` in one launch per 64 parts."""
    _queue(_cuda.split_digits, *agreed, x, ELEMENT_TYPES[x.dtype], x.numel(), digits, offsets)


def round_digits(agreed: Ranges, digits: torch.Tensor, divisor: int, out: torch.Tensor) -> None:
    """:func:`dtcomm.kernels.local_tasks.round_digits` in one launch."""
    _queue(_cuda.round_digits, *agreed, digits, out.numel(), divisor, ELEMENT_TYPES[out.dtype], out)


def _queue(kernel: Callable[..., None], *arguments: Any) -> None:
    """Queue a kernel of the tensors among the arguments, of which it takes the addresses."""
    device = _device_of(*(argument for argument in arguments if isinstance(argument, torch.Tensor)))
    numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    with torch.cuda.device(device):
        kernel(*numbers, torch.cuda.current_stream(device).cuda_stream)


def _shape(factor: torch.Tensor) -> tuple[int, int]:
    count, n = factor.shape
    return count, n


def _table(payloads: list[int], device: torch.device) -> torch.Tensor | None:
    """The payloads' addresses in device memory, if they are too many for a kernel's arguments; else None.

    The allocators of torch keep both ends of the copy, and the table, alive until the stream has used them.
    """
    if len(payloads) <= _cuda.INLINE_PAYLOADS:
        return None
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"payloads: expected at most {_cuda.INLINE_PAYLOADS} during graph capture, got {len(payloads)}"
        )
    host = torch.tensor(payloads, dtype=torch.int64).pin_memory()
    return host.to(device, non_blocking=True)


def _device_of(*tensors: torch.Tensor | None) -> torch.device:
    """The device of `tensors`. Raises ValueError unless it is one CUDA device for all."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1 or any(device.type != "cuda" for device in devices):
        raise ValueError(f"tensors: expected all on one CUDA device, got {sorted(map(str, devices))}")
    return devices.pop()
