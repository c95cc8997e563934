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
from dtcomm.kernels.common import Step
from dtcomm.kernels.dispatch import REFERENCE, current
from dtcomm.kernels.reference import epilogue as reference

PLAIN = parse("none")


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
    _check(which, out, bias, residual, weight, normed)
    if sum(numel for _, numel in runs) != out.numel():
        raise ValueError(
            f"runs: hold {sum(numel for _, numel in runs)} elements, out {tuple(out.shape)} has {out.numel()}"
        )
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
        out.shape[-1],
        ELEMENT_TYPES[out.dtype],
        _address(bias),
        _address(residual),
        out.data_ptr(),
        _address(weight),
        eps,
        _address(normed),
    )
    return out


def follow(
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    normed: torch.Tensor | None = None,
) -> Step:
    """`epilogue` of sums that an operation leaves in ``out`` uncompressed; the residual must be another tensor.

    As a step after an operation of the native engine it is taken piece by piece, while the elements are in the cache.
    """
    _check(PLAIN, out, bias, residual, weight, normed)
    others = (bias, residual, weight, normed)

    def alone() -> None:
        payload = torch.zeros(PLAIN.wire_bytes(out.numel(), out.dtype), dtype=torch.uint8)
        sums = out.view(-1).view(torch.uint8)
        payload[: sums.numel()] = sums
        reference.epilogue(PLAIN, [(payload, out.numel())], out, bias, residual, weight, eps, normed)

    native = _C.step_follow(
        out.numel(),
        out.shape[-1] or 1,
        ELEMENT_TYPES[out.dtype],
        _address(bias),
        _address(residual),
        out.data_ptr(),
        _address(weight),
        eps,
        _address(normed),
    )
    return Step(native=native, reference=alone, codec=PLAIN, held=(out, *others))


def _check(
    codec: Codec,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    normed: torch.Tensor | None,
) -> None:
    checks.floats("out", out, out.numel(), *FLOAT_TYPES)
    checks.element_type("out", codec, out.dtype)
    if not out.is_cpu:
        raise ValueError(f"out: expected a tensor on the CPU, got one on {out.device}")
    if out.ndim == 0:
        raise ValueError("out: expected [..., features], got no dimension")
    for name, tensor in (("bias", bias), ("weight", weight)):
        if tensor is not None:
            checks.floats(name, tensor, out.shape[-1], out.dtype, beside=out)
    for name, tensor in (("residual", residual), ("normed", normed)):
        if tensor is not None:
            checks.floats(name, tensor, out.numel(), out.dtype, beside=out)
    if weight is not None and normed is None:
        raise ValueError("weight: belongs to normed, which is not given")


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
