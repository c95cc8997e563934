"""Codec sign: signs and the mean magnitude of each block."""

from __future__ import annotations

import numpy as np
import torch

from dtcomm.codecs import Sign
from dtcomm.kernels.reference.floats import NAN, Bytes, Floats, canonical, narrow, widen
from dtcomm.kernels.reference.scales import load_fields, store_fields

_LARGEST = {"bf16": np.uint32(0x7F7F0000), "fp32": np.uint32(0x7F7FFFFF)}


def encode(codec: Sign, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule, without its padding."""
    rows = np.pad(x, (0, -len(x) % codec.block)).reshape(-1, codec.block)
    parts = np.abs(rows) * np.float32(1 / codec.block)
    while parts.shape[1] > 1:
        first, second = np.split(parts, 2, axis=1)
        parts = first + second
    mean = parts[:, 0]
    bad = ~np.isfinite(mean)
    if len(x) % codec.block:
        mean = mean.copy()
        mean[-1] /= np.float32(len(x) % codec.block / codec.block)
    kind = torch.bfloat16 if codec.scale == "bf16" else torch.float32
    scale = widen(kind, narrow(kind, np.where(bad, np.float32(0), mean)))
    scale = np.minimum(scale, _LARGEST[codec.scale].view(np.float32))
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    bits = np.signbit(rows) & (~bad & (scale > 0))[:, None]
    codes = np.packbits(bits.reshape(-1), bitorder="little")
    return np.concatenate([store_fields(np.where(bad, NAN, scale), codec.scale), codes])


def decode(codec: Sign, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    layout = codec.layout()
    scale = load_fields(granule[: layout.codes_at(n)], codec.scale)
    bits = np.unpackbits(granule[layout.codes_at(n) : layout.used(n)], bitorder="little")
    negative = bits.reshape(-1, codec.block) == 1
    return canonical(np.where(negative, -scale[:, None], scale[:, None])).reshape(-1)[:n]
