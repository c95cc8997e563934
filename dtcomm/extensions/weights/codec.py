"""Deltas of tensors: the bytes that turn one version of a tensor into the next, bit for bit.

`docs/reference/weights-format.md` specifies the bytes, and csrc/cpu/families/weight_delta.cpp writes and reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dtcomm import _C
from dtcomm.errors import PayloadCorrupt
from dtcomm.extensions.weights import reference
from dtcomm.extensions.weights.slices import bytes_of
from dtcomm.kernels import dispatch

_KINDS = {
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float32: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.uint8: 0,
    torch.int8: 0,
}
_PIECE = 1 << 20  # elements: pieces of tensors on devices are multiples of it
_PIECES_AT_ONCE = 8


def encode(old: torch.Tensor, new: torch.Tensor, *, threads: int = 0) -> tuple[torch.Tensor, int]:
    """Return the payload, on the CPU, that turns `old` into `new`, and how many elements differ.

    The tensors have the same shape, dtype and device, CPU or CUDA, and are contiguous. `threads` are of the CPU; 0
    takes as many as torch. The payload has at most the bytes of `new`, 0.02 % more and 57 bytes.

    >>> old, new = torch.zeros(100_000), torch.zeros(100_000)
    >>> new[7] = 1.5
    >>> payload, changed = encode(old, new)
    >>> decode(old, payload, out=old)
    >>> payload.numel(), changed, torch.equal(old, new)
    (69, 1, True)
    """
    kind = _kind("old", old)
    _same("new", new, "old", old)
    if dispatch.current() == dispatch.REFERENCE:
        data, changed = reference.encode(kind, _copied(old), _copied(new))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8), changed
    writer = _C.DeltaWriter(kind, old.numel())
    kernel, count, changed = dispatch.native_kernel(), _threads(threads), 0
    for first, (before, after) in _pieces(old, new):
        changed += writer.add(kernel, first, before.numel(), before.data_ptr(), after.data_ptr(), count)
    payload = torch.empty(writer.bytes, dtype=torch.uint8)
    writer.write(payload.data_ptr())
    return payload, changed


def decode(
    old: torch.Tensor,
    payload: torch.Tensor | bytes | bytearray | memoryview,
    out: torch.Tensor,
    *,
    threads: int = 0,
    checked: bool = False,
) -> None:
    """Write to `out` the tensor that a payload makes of `old`; `out` may be `old`, but not overlap it otherwise.

    The payload is checked, together with what `old` shows of being another tensor. It does not name the tensor it was
    made from: compare checksums to be sure of it. PayloadCorrupt: `old` has not changed, and another `out` may hold
    anything. `checked`: the payload was decoded once with the same `old`; only its head and index are checked again.
    If `old` has changed since, `out` is wrong, but no other memory is touched.
    """
    kind = _kind("old", old)
    _same("out", out, "old", old)
    buffer = _bytes_of(payload)
    reader = _C.DeltaReader(buffer.data_ptr(), buffer.numel())
    _refuse(reader.error)
    if reader.kind != kind or reader.numel != old.numel():
        _refuse(
            f"is for {reader.numel} elements of kind {reader.kind}; `old` has {old.numel()} elements of kind {kind}"
        )
    if dispatch.current() == dispatch.REFERENCE:
        try:
            data = bytearray(reference.decode(kind, _copied(buffer), _copied(old)))
        except ValueError as error:
            raise PayloadCorrupt(f"the payload {error}") from None
        if data:
            out.copy_(torch.frombuffer(data, dtype=torch.uint8).view(out.dtype).view(out.shape))
        return
    kernel, count = dispatch.native_kernel(), _threads(threads)
    if old.is_cpu:
        _refuse(reader.decode(kernel, 0, old.numel(), old.data_ptr(), out.data_ptr(), count, checked))
        return
    for first, (before,) in () if checked else _pieces(old):
        _refuse(reader.decode(kernel, first, before.numel(), before.data_ptr(), 0, count, False))
    flat = out.view(-1)
    for first, (before,) in _pieces(old):
        reader.decode(kernel, first, before.numel(), before.data_ptr(), before.data_ptr(), count, True)
        flat[first : first + before.numel()].copy_(before)


def _copied(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor.cpu()).numpy()) if tensor.numel() else b""


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Yield (first element, the elements on the CPU): whole tensors, or pieces of those on devices."""
    numel = tensors[0].numel()
    if numel == 0:
        return
    if tensors[0].is_cpu:
        yield 0, tensors
        return
    size = min(numel, _PIECE * _PIECES_AT_ONCE)
    pinned = [torch.empty(size, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors]
    for first in range(0, numel, size):
        count = min(size, numel - first)
        for tensor, room in zip(tensors, pinned, strict=True):
            room[:count].copy_(tensor.view(-1)[first : first + count])
        yield first, tuple(room[:count] for room in pinned)


def _kind(argument: str, tensor: torch.Tensor) -> int:
    if tensor.dtype not in _KINDS:
        raise TypeError(f"{argument}: {tensor.dtype} has no codec; valid: {', '.join(map(str, _KINDS))}")
    if not tensor.is_contiguous():
        raise ValueError(f"{argument}: is not contiguous; pass {argument}.contiguous()")
    return _KINDS[tensor.dtype]


def _same(argument: str, tensor: torch.Tensor, other: str, like: torch.Tensor) -> None:
    for what in ("shape", "dtype", "device"):
        given, valid = getattr(tensor, what), getattr(like, what)
        if given != valid:
            raise ValueError(f"{argument}: has {what} {given}; {other} has {valid}")
    _kind(argument, tensor)


def _threads(threads: int) -> int:
    if threads < 0:
        raise ValueError(f"threads: {threads} is negative; valid: 0 (as many as torch) or more")
    return threads or torch.get_num_threads()


def _bytes_of(payload: torch.Tensor | bytes | bytearray | memoryview) -> torch.Tensor:
    if isinstance(payload, torch.Tensor):
        if payload.dtype != torch.uint8 or not payload.is_cpu or not payload.is_contiguous():
            raise ValueError("payload: must be a contiguous uint8 tensor on the CPU, or bytes")
        return payload
    view = memoryview(payload)
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if view.readonly:  # torch warns of memory that it must not write to
        return torch.frombuffer(bytearray(view), dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8)


def _refuse(error: str) -> None:
    if error:
        raise PayloadCorrupt(f"the payload {error}")
