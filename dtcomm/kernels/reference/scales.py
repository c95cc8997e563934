"""Scales and zero points of the block formats."""

from __future__ import annotations

import numpy as np
import torch

from dtcomm.kernels.reference.floats import INFINITY, NAN, Bytes, Floats, Words, widen


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
