"""A product summed over ranks, with what follows the sum, for autograd.

    y = x W' summed over the ranks + bias + residual,  normed = RMS norm of y

The forward pass is that of `dtcomm.tp.row_linear`: what follows happens in the pass that decodes. The backward pass is
the uncompressed function's.
"""

from __future__ import annotations

from typing import Any

import torch

from dtcomm.tp.comm_config import Wire
from dtcomm.tp.flash_all_reduce import Epilogue, Norm, Result
from dtcomm.tp.functional import differentiable
from dtcomm.tp.row_linear import row_linear


def multiplied(
    x: torch.Tensor, weight: torch.Tensor, wire: Wire, chunks: int | str, after: Epilogue
) -> Result:
    """``x weight'``, [..., in] and [out, in], summed over the ranks of `wire`, and what follows.

    All on one device; with something that follows of one type.
    """
    norm = after.norm
    scale = None if norm is None else norm.weight
    tensors = (x, weight, after.bias, after.residual, scale)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in tensors):
        return row_linear(x, weight, wire, chunks, after)
    eps = None if norm is None else norm.eps
    made = differentiable(_Multiplied, *tensors, wire, chunks, eps)
    return Result(made, None) if norm is None else Result(*made)


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        scale: torch.Tensor | None,
        wire: Wire,
        chunks: int | str,
        eps: float | None,
    ) -> Any:
        weight = weight.to(x.dtype)
        norm = None if eps is None else Norm(scale, eps)
        y, normed = row_linear(x, weight, wire, chunks, Epilogue(bias, residual, norm))
        ctx.eps = eps
        ctx.save_for_backward(x, weight, None if normed is None else y, scale)
        return y if normed is None else (y, normed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_norm: torch.Tensor | None = None) -> Any:
        x, weight, y, scale = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dscale = None
        if y is not None and of_norm is not None:
            through, dscale = _through_norm(of_norm, y, scale, ctx.eps)
            gradient = gradient + through
        flat = gradient.reshape(-1, gradient.shape[-1])
        dx = (flat @ weight).view_as(x) if needs[0] else None
        dw = flat.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None
        dbias = flat.sum(0) if needs[2] else None
        return dx, dw, dbias, gradient if needs[3] else None, dscale if needs[4] else None, None, None, None


def _through_norm(
    gradient: torch.Tensor, y: torch.Tensor, scale: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of what was normed and of the norm's weight; sums are in fp32."""
    wide = y.float()
    root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit, inner = wide * root, gradient.float()
    dscale = None
    if scale is not None:
        dscale = (inner * unit).reshape(-1, y.shape[-1]).sum(0).to(scale.dtype)
        inner = inner * scale.float()
    through = root * (inner - unit * (inner * unit).mean(-1, keepdim=True))
    return through.to(y.dtype), dscale
