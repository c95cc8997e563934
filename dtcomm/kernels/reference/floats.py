"""Arrays of fp32 and of bytes: casts between element types, the canonical NaN, reductions, scales and zero points."""

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


def narrow_at_random(x: Floats, random: Floats) -> Bytes:
    """fp32 cast to bf16 as bytes, away from zero with the probability of the distance from the nearer neighbour to it.

    `random`: uniform in [0, 1), of which 16 bits count. Every NaN becomes the canonical one.
    """
    step = (random * np.float32(65536)).astype(np.uint32)
    halves = np.where(np.isnan(x), np.uint32(0x7FC0), x.view(np.uint32) + step >> 16)
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


def block_scale(top: Words, levels: float, type: str, *, up: bool) -> Floats:
    """Scales that map magnitudes (or ranges) with the bits `top` to code `levels`.

    `type`: bf16 or fp32; `up`: round up to it instead of to nearest.
    """
    most = np.float32(levels)
    bits = (top.view(np.float32) / most).view(np.uint32)
    cap = (np.finfo(np.float32).max / most).view(np.uint32)
    with np.errstate(over="ignore"):
        cap -= np.uint32(np.isinf(cap.view(np.float32) * most))
    if type == "bf16":
        half = np.full_like(bits, 0xFFFF) if up else 0x7FFF + (bits >> 16 & 1)
        bits, cap = ((bits + half) & 0xFFFF0000).astype(np.uint32), cap & 0xFFFF0000
    rounded = np.minimum(bits, cap)
    rounded = np.where(rounded < 0x00800000, 0, rounded)
    return np.where(top >= INFINITY, NAN.view(np.uint32), rounded).astype(np.uint32).view(np.float32)


def inverse(scale: Floats) -> Floats:
    """The factors that turn elements into codes: 0 for zero blocks and NaN blocks."""
    return np.where(scale > 0, np.float32(1) / scale, np.float32(0))


def zero_point(lowest: Floats, type: str) -> Floats:
    """`lowest` rounded towards -Inf to the scale's type, but never to -Inf; -0 becomes +0."""
    bits = lowest.view(np.uint32)
    if type == "bf16":
        cut = bits & 0xFFFF0000
        away = (bits != cut) & (bits >> 31 == 1) & (cut != 0xFF7F0000)
        bits = np.where(away, cut + 0x10000, cut).astype(np.uint32)
    return bits.view(np.float32) + np.float32(0)


def store_fields(values: Floats, type: str) -> Bytes:
    """The bytes of values that the type represents exactly."""
    if type == "fp32":
        return values.view(np.uint8)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def load_fields(raw: Bytes, type: str) -> Floats:
    """The inverse of :func:`store_fields`."""
    return widen(torch.float32 if type == "fp32" else torch.bfloat16, np.ascontiguousarray(raw))


def rows_of(x: Floats, block: int) -> Floats:
    """One row per block. The last row is padded with its last element, which changes no maximum or minimum."""
    return np.pad(x, (0, -len(x) % block), mode="edge").reshape(-1, block)
