"""The Triton kernels, for CUDA devices without a compiled `_cuda`, and for CPU tensors under TRITON_INTERPRET=1.

They run fp16, bf16, int8, int4, fp8_e4m3 and fp8_e3m4; :func:`supports` tests a codec. The calls import `launch` and
with it Triton, which takes longer to import than dtcomm; `rules` needs no Triton.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from dtcomm.codecs import Codec
from dtcomm.kernels.calls import Combine, EpilogueCall
from dtcomm.kernels.triton.rules import rules_of

__all__ = ["combine", "decode", "installed", "interpreted", "rules_of", "run_epilogue", "supports"]


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


def run_epilogue(sums: torch.Tensor, call: EpilogueCall) -> None:
    """``out`` <- (sums + bias) + addend, and its RMS norm: `dtcomm.kernels.epilogue` of decoded ``sums``.

    ``sums`` is fp32 or of the type of ``out``, and may be ``out``. Raises RuntimeError if Triton is not installed.
    """
    if not installed():
        raise RuntimeError(
            f"out: on {call.out.device}, where Triton adds bias and addend; install it (pip install dtcomm[triton])"
        )
    from dtcomm.kernels.triton import launch

    launch.run_epilogue(sums, call)
