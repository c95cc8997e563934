"""Arrays of fp32 and of bytes, the casts between element types, and the canonical NaN."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint32]

INFINITY = np.uint32(0x7F800000)
NAN = np.uint32(0x7FC00000).view(np.float32)


def narrow(dtype: torch.dtype, x: Floats) -> Bytes:
    """fp32 cast to a floating type, as bytes: to nearest, ties to even; every NaN becomes the canonical one."""
    if dtype == torch.float32:
        return x.view(np.uint8)
    if dtype == torch.float16:
        halves = np.where(np.isnan(x), np.uint16(0x7E00), x.astype(np.float16).view(np.uint16))
    else:
        bits = x.view(np.uint32)
        halves = np.where(np.isnan(x), np.uint32(0x7FC0), bits + 0x7FFF + (bits >> 16 & 1) >> 16)
    return halves.astype(np.uint16).view(np.uint8)


def widen(dtype: torch.dtype, raw: Bytes) -> Floats:
    """Bytes of a floating type cast to fp32."""
    if dtype == torch.float32:
        return raw.view(np.float32)
    if dtype == torch.float16:
        halves = raw.view(np.uint16)
        # Whether numpy makes a signalling NaN quiet depends on the machine.
        quiet = np.where((halves & 0x7FFF) > 0x7C00, halves | 0x0200, halves)
        return quiet.astype(np.uint16).view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def canonical(x: Floats) -> Floats:
    """`x` with every NaN replaced by the canonical one."""
    return np.where(np.isnan(x), NAN, x)


def magnitude(x: Floats) -> Words:
    """|x| as integers, ordered like the numbers, then Inf, then every NaN."""
    bits: Words = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0x7FFFFFFF)
    return bits


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor's memory."""
    raw: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return raw


def get(tensor: torch.Tensor) -> Floats:
    """The elements of a floating tensor as fp32."""
    return widen(tensor.dtype, bytes_of(tensor))


def put(tensor: torch.Tensor, x: Floats) -> None:
    """Store fp32 values in a floating tensor."""
    bytes_of(tensor)[:] = narrow(tensor.dtype, x)


def add(a: Any, b: Any) -> Any:
    return a + b  # numpy's bool + bool is `or`


def minimum(a: Any, b: Any) -> Any:
    return np.where((b < a) | (b != b), b, a)


def maximum(a: Any, b: Any) -> Any:
    return np.where((b > a) | (b != b), b, a)


JOIN = {"sum": add, "min": minimum, "max": maximum}
