"""The epilogue of a summed activation in numpy: every sum and product is rounded to fp32, in a stated order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dtcomm.codecs import Codec
from dtcomm.kernels.reference import decode
from dtcomm.kernels.reference.floats import get, put

LANES = 16


def epilogue(
    codec: Codec,
    runs: Sequence[tuple[torch.Tensor, int]],
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    norm_out: torch.Tensor | None,
) -> None:
    """:func:`dtcomm.kernels.epilogue.epilogue`."""
    parts = []
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
    if bias is not None:
        y = y + get(bias)
    if residual is not None:
        y = y + get(residual).reshape(y.shape)
    put(out, y.reshape(-1))
    if norm_out is None:
        return
    y = get(out).reshape(y.shape)
    mean = squares(y) / np.float32(out.shape[-1])
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    y = y * scale[:, None]
    if weight is not None:
        y = y * get(weight)
    put(norm_out, y.reshape(-1))


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
