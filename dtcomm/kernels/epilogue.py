"""What follows a summed activation, as one verb: decode, add the bias, add the residual stream, and its RMS norm.

Apart they are four passes over memory; here a row is decoded into the cache, where the rest happens to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES, FLOAT_TYPES
from dtcomm.kernels import checks, corrupt, native
from dtcomm.kernels.dispatch import REFERENCE, current
from dtcomm.kernels.reference import epilogue as reference


def epilogue(
    codec: Codec | str,
    runs: Sequence[tuple[torch.Tensor, int]],
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out`` (fp32, fp16 or bf16 [..., features]) <- the decoded payloads, plus bias, plus residual; returns it.

    runs: payloads and their elements, joined those of `out`. bias, weight: [features]; residual, normed: as `out`,
    which the residual may be; all of its type and on the CPU. normed <- ``out`` over the root of its mean square (plus
    eps), by rows, times the weight. Sums and products are fp32; `out` and `normed` are rounded once. TypeError and
    ValueError name the argument.
    """
    which = parse(codec)
    checks.floats("out", out, out.numel(), *FLOAT_TYPES)
    checks.element_type("out", which, out.dtype)
    if not out.is_cpu:
        raise ValueError(f"out: expected a tensor on the CPU, got one on {out.device}")
    if out.ndim == 0 or sum(numel for _, numel in runs) != out.numel():
        raise ValueError(
            f"runs: hold {sum(numel for _, numel in runs)} elements, out {tuple(out.shape)} has {out.numel()}"
        )
    features = out.shape[-1]
    for name, tensor in (("bias", bias), ("weight", weight)):
        if tensor is not None:
            checks.floats(name, tensor, features, out.dtype, beside=out)
    for name, tensor in (("residual", residual), ("normed", normed)):
        if tensor is not None:
            checks.floats(name, tensor, out.numel(), out.dtype, beside=out)
    if weight is not None and normed is None:
        raise ValueError("weight: belongs to normed, which is not given")
    payloads = [
        checks.payload(f"runs[{at}]", payload, which, numel, out.dtype)
        for at, (payload, numel) in enumerate(runs)
    ]
    for payload, (_, numel) in zip(payloads, runs, strict=True):
        corrupt.refuse(which, [payload], numel)
    if out.numel() == 0:
        return out
    if current() == REFERENCE:
        reference.epilogue(which, runs, out, bias, residual, weight, eps, normed)
        return out
    _C.epilogue(
        native.current_name(),
        which.native(),
        [(payload.data_ptr(), numel) for payload, (_, numel) in zip(payloads, runs, strict=True)],
        features,
        ELEMENT_TYPES[out.dtype],
        _address(bias),
        _address(residual),
        out.data_ptr(),
        _address(weight),
        eps,
        _address(normed),
    )
    return out


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
