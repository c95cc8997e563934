"""What follows a summed activation, as one verb: decode, add the bias, add the residual stream, and its RMS norm.

Apart they are four passes over memory; here a row is decoded into the cache, where the rest happens to it. On CUDA
tensors Triton does the rest in a pass of its own, or two where a norm follows, with the CPU's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES, FLOAT_TYPES
from dtcomm.kernels import checks, corrupt, cpu, ops, triton
from dtcomm.kernels.dispatch import REFERENCE, TRITON, current
from dtcomm.kernels.local_steps import Step
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
    which the residual may be; all of its type and on its device. normed <- ``out`` over the root of its mean square
    (plus eps), by rows, times the weight. Sums and products are fp32; `out` and `normed` are rounded once. TypeError
    and ValueError name the argument.
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
    if _by_triton(out):
        sums = _decoded(which, runs, out, bias is not None or residual is not None)
        triton.follow(sums, out, bias, residual, weight, eps, normed)
        return out
    if current() == REFERENCE:
        reference.epilogue(which, runs, out, bias, residual, weight, eps, normed)
        return out
    _C.epilogue(
        cpu.current_name(),
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


@dataclass(frozen=True, kw_only=True)
class Follow(Step):
    """What `follow` makes. On a CUDA device it is queued on the current stream; kernels of a sum may take it over."""

    out: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    eps: float
    normed: torch.Tensor | None

    def __call__(self) -> None:
        if not _by_triton(self.out):
            super().__call__()
        elif self.out.numel():
            triton.follow(self.out, self.out, self.bias, self.residual, self.weight, self.eps, self.normed)

    def norm(self) -> Follow | None:
        """What is left where bias and residual have been added."""
        if self.normed is None:
            return None
        return follow(self.out, weight=self.weight, eps=self.eps, normed=self.normed)


def follow(
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    normed: torch.Tensor | None = None,
) -> Follow:
    """`epilogue` of sums that an operation leaves in ``out`` uncompressed; the residual must be another tensor.

    As a step after an operation of the native engine it is taken piece by piece, while the elements are in the cache;
    after a fused all-reduce on CUDA devices bias and residual are added by its kernel.
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
    return Follow(
        native=native,
        reference=alone,
        codec=PLAIN,
        held=(out, *others),
        out=out,
        bias=bias,
        residual=residual,
        weight=weight,
        eps=eps,
        normed=normed,
    )


def can_follow(*tensors: torch.Tensor | None) -> bool:
    """Whether passes of our own can take them all: of one type, on one device that has the kernels."""
    given = [tensor for tensor in tensors if tensor is not None]
    dtype, device = given[0].dtype, given[0].device
    if dtype not in FLOAT_TYPES or any(each.dtype != dtype or each.device != device for each in given):
        return False
    return device.type == "cpu" or (device.type == "cuda" and triton.installed())


def _by_triton(out: torch.Tensor) -> bool:
    return not out.is_cpu or current() == TRITON


def _decoded(
    codec: Codec, runs: Sequence[tuple[torch.Tensor, int]], out: torch.Tensor, added: bool
) -> torch.Tensor:
    """The runs, joined: in ``out``, unless something is ``added`` before they are rounded."""
    dtype = torch.float32 if added and codec.name != "none" else out.dtype
    sums = torch.empty(out.numel(), dtype=dtype, device=out.device) if added else out.view(-1)
    at = 0
    for payload, numel in runs:
        ops.decode(codec, payload, numel, dtype, out=sums[at : at + numel])
        at += numel
    return sums


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
