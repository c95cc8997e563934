"""What a tensor may be compressed with: a codec, which any collective takes, or a compressor with a memory."""

from __future__ import annotations

from typing import TypeAlias

import torch

from dtcomm.codecs import Codec, codec
from dtcomm.compress.powersgd import NAME, PowerSGD

Scheme: TypeAlias = Codec | PowerSGD


def scheme(spec: str | Scheme) -> Scheme:
    """What `spec` describes; a scheme is returned unchanged. Raises TypeError or ValueError as `codec` does."""
    if isinstance(spec, PowerSGD):
        return spec
    if isinstance(spec, str) and spec.strip().startswith(NAME):
        return PowerSGD.parse(spec)
    return codec(spec)


def matrix_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a gradient as compressors see it: the first dimension by all others."""
    rows = tensor.shape[0]
    return rows, tensor.numel() // rows if rows else 0
