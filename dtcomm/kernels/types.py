"""One call of a kernel, after the arguments were checked: what every kernel, native or not, is handed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dtcomm.codecs import Codec

OPERATIONS = {"sum": 0, "min": 1, "max": 2}  # csrc/core/types.h's numbers


@dataclass(frozen=True, kw_only=True)
class Combine:
    """csrc/cpu/kernels.h's ``Combine``: sum payloads and local, divide, encode, keep the error; each part
    optional.

    Tensors are contiguous, on one device and of the right size. `local` and `out` are of `dtype` or float32;
    `residual` is read and rewritten; `payload_out` receives the encoding and `out` what it decodes to, or,
    without a `payload_out`, the sum itself.
    """

    codec: Codec
    numel: int
    dtype: torch.dtype
    payloads: tuple[torch.Tensor, ...] = ()
    local: torch.Tensor | None = None
    position: int = 0
    residual: torch.Tensor | None = None
    divisor: int = 1
    op: str = "sum"
    key: int = 0
    offset: int = 0
    payload_out: torch.Tensor | None = None
    out: torch.Tensor | None = None
