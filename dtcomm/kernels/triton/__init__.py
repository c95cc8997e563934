"""The Triton kernels, for CUDA devices without a compiled `_cuda`, and for CPU tensors under TRITON_INTERPRET=1.

They run fp16, bf16, int8, int4 and fp8_e4m3; :func:`supports` tests a codec. Triton is imported with the first call,
because importing it takes longer than importing dtcomm.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from dtcomm.codecs import Codec
from dtcomm.kernels.triton.codec_constants import rules_of
from dtcomm.kernels.types import Combine

__all__ = ["combine", "decode", "installed", "interpreted", "run_epilogue", "supports"]


@cache
def installed() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU. Triton decides it when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def supports(codec: Codec) -> bool:
    """Whether the kernels run `codec`."""
    return (codec.elementwise and codec.name != "none") or rules_of(codec) is not None


def combine(call: Combine) -> None:
    """Run one call (see :class:`Combine`)."""
    from dtcomm.kernels.triton import launch

    launch.combine(call)


def decode(codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    """`out` <- the `numel` elements of the payload; `dtype` is the type of the tensor that was encoded."""
    from dtcomm.kernels.triton import launch

    launch.decode(codec, payload, numel, dtype, out)


def run_epilogue(
    sums: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    norm_out: torch.Tensor | None,
) -> None:
    """``out`` <- (sums + bias) + residual, ``norm_out`` <- its RMS norm: `dtcomm.kernels.epilogue` of decoded ``sums``.

    ``sums`` is fp32 or of the type of ``out``, and may be ``out``. Raises RuntimeError if Triton is not installed.
    """
    if not installed():
        raise RuntimeError(
            f"out: on {out.device}, where Triton adds bias and residual; install it (pip install dtcomm[triton])"
        )
    from dtcomm.kernels.triton import epilogue

    epilogue.run_epilogue(sums, out, bias, residual, weight, eps, norm_out)
