"""The epilogue of a summed activation in numpy: every sum and product is rounded to fp32, in a stated order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dtcomm.codecs import Codec
from dtcomm.kernels.calls import EpilogueCall
from dtcomm.kernels.reference import decode
from dtcomm.kernels.reference.floats import NAN, get, put
from dtcomm.kernels.reference.minifloat import FORMATS

LANES = 16
E4M3_NAN = 127


def epilogue(codec: Codec, runs: Sequence[tuple[torch.Tensor, int]], call: EpilogueCall) -> None:
    """:func:`dtcomm.kernels.epilogue.epilogue`."""
    out, parts = call.out, []
    for payload, numel in runs:
        part = torch.empty(numel)
        if out.dtype != torch.float32 and codec.name == "none":
            raw = torch.empty(numel, dtype=out.dtype)
            decode(codec, payload, numel, out.dtype, raw)
            part.copy_(raw)
        elif numel:
            decode(codec, payload, numel, torch.float32, part)
        parts.append(part.numpy())
    y: Any = np.concatenate(parts).reshape(-1, out.shape[-1])
    if call.bias is not None:
        y = y + get(call.bias)
    if call.addend is not None:
        y = y + get(call.addend).reshape(y.shape)
    put(out, y.reshape(-1))
    if not call.has_norm:
        return
    y = get(out).reshape(y.shape)
    mean = squares(y) / np.float32(out.shape[-1])
    scale = np.float32(1) / np.sqrt(mean + np.float32(call.eps))
    with np.errstate(invalid="ignore"):  # an infinite element has the mean Inf: Inf times 0 is NaN
        y = y * scale[:, None]
    if call.weight is not None:
        y = y * get(call.weight)
    norm = torch.empty_like(out) if call.norm_out is None else call.norm_out
    put(norm, y.reshape(-1))
    if call.codes is not None and call.scales is not None:
        quantize(get(norm), call.codes, call.scales)


def quantize(x: Any, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Write x over the scale of its group to ``values``, to nearest even; a scale is a group's largest magnitude over
    the largest number of the type of ``values``.
    """
    groups = x.reshape(scales.numel(), -1)
    floating = values.dtype != torch.int8
    finite = np.isfinite(groups).all(axis=1)
    largest = np.float32(448 if floating else 127)
    scale = np.where(finite, np.abs(np.where(finite[:, None], groups, 0)).max(axis=1) / largest, NAN)
    scale = scale.astype(np.float32)
    usable = (scale > 0)[:, None]  # not of zeros, and not NaN
    t = np.divide(groups, scale[:, None], out=np.zeros_like(groups), where=usable)
    if floating:
        codes = np.where(finite[:, None], FORMATS["e4m3"].nearest(t), E4M3_NAN)
    else:
        codes = np.rint(np.clip(t, -largest, largest)).astype(np.int8).view(np.uint8)
    # What is not representable as a scale counts as zero, as its codes do.
    codes = np.where(usable | ~finite[:, None], codes, 0)
    values.view(torch.uint8).view(-1).copy_(torch.from_numpy(codes.astype(np.uint8).reshape(-1)))
    scales.view(-1).copy_(torch.from_numpy(scale))


def squares(rows: Any) -> Any:
    """Each row's sum of squares: element i is added to lane i mod 16; lanes are then folded in halves."""
    count, n = rows.shape
    padded = np.zeros((count, -(-n // LANES) * LANES), np.float32)
    padded[:, :n] = rows * rows
    lanes = np.zeros((count, LANES), np.float32)
    for step in range(0, padded.shape[1], LANES):
        lanes = lanes + padded[:, step : step + LANES]
    half = LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0]
