"""The epilogue kernels: bias, residual, RMS norm and its quantization, with the bytes of csrc/cpu/epilogue.h.

Squares are added as there: element i of a row to lane i mod 16, lanes then in halves; every product is rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dtcomm.kernels.triton.combine_kernels import ROUND
from dtcomm.kernels.triton.floats import INFINITY, NAN, bits_of, canonical, float_of, magnitude, narrow, widen
from dtcomm.kernels.triton.launch import on_device

TILE = 2048
LANES = 16
E4M3_NORMAL = tl.constexpr(121 << 23)  # bits of 2^-6, the smallest normal number
ROWS = 32  # of a program: its loads are of LANES elements a row


@triton.jit(do_not_specialize=["numel", "features"])
def add_terms(sums, bias, residual, out, numel: tl.int64, features: tl.int64, TILE: tl.constexpr):
    """``out`` <- (sums + bias) + residual; absent tensors are None."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    i = begin + tl.arange(0, TILE)
    here = i < numel
    x = widen(tl.load(sums + i, mask=here))
    if bias is not None:
        # One long division a program, short ones for its elements.
        column = ((begin % features).to(tl.int32) + tl.arange(0, TILE)) % features.to(tl.int32)
        x += widen(tl.load(bias + column, mask=here))
    if residual is not None:
        x += widen(tl.load(residual + i, mask=here))
    tl.store(out + i, narrow(canonical(x), out.dtype.element_ty), mask=here)


@triton.jit
def _halves(lanes, ROWS: tl.constexpr, HALF: tl.constexpr):
    return tl.sum(lanes.reshape(ROWS, 2, HALF), axis=1)


@triton.jit(do_not_specialize=["rows", "features"])
def norm_rows(
    x,
    weight,
    norm_out,
    rows: tl.int64,
    features: tl.int64,
    eps: tl.float32,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """``norm_out`` <- x over the root of its rows' mean square, times the weight if there is one."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    begin = row * features
    lanes = tl.zeros([ROWS, LANES], tl.float32)
    for column in range(0, features, LANES):
        here = (row < rows) & (column + lane < features)
        part = widen(tl.load(x + begin + column + lane, mask=here, other=0.0))
        lanes += part * part
    total = _halves(_halves(_halves(_halves(lanes, ROWS, 8), ROWS, 4), ROWS, 2), ROWS, 1)
    mean = tl.div_rn(total, tl.zeros_like(total) + features.to(tl.float32))
    scale = tl.div_rn(tl.zeros_like(mean) + 1.0, tl.sqrt_rn(mean + eps))
    for column in range(0, features, LANES):
        here = (row < rows) & (column + lane < features)
        part = widen(tl.load(x + begin + column + lane, mask=here, other=0.0)) * scale
        if weight is not None:
            part *= widen(tl.load(weight + column + lane, mask=column + lane < features, other=0.0))
        tl.store(norm_out + begin + column + lane, narrow(part, norm_out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["groups", "size"])
def quantize_groups(
    x,
    codes,
    scales,
    groups: tl.int64,
    size: tl.int64,
    INT8: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """``codes`` <- x over the scale of its group of ``size`` elements, ``scales`` <- the largest over 448 or 127."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    begin = group * size
    largest = tl.zeros([ROWS, LANES], tl.int32)
    for column in range(0, size, LANES):
        here = (group < groups) & (column + lane < size)
        part = widen(tl.load(x + begin + column + lane, mask=here, other=0.0))
        largest = tl.maximum(largest, magnitude(part))
    top = tl.max(largest, axis=1)[:, None]
    LARGEST: tl.constexpr = 127.0 if INT8 else 448.0
    quotient = tl.div_rn(float_of(tl.where(top < INFINITY, top, 0)), tl.full(top.shape, LARGEST, tl.float32))
    scale = float_of(tl.where(top < INFINITY, bits_of(quotient), NAN))
    tl.store(scales + group, scale, mask=group < groups)
    usable = bits_of(quotient) > 0
    divisor = tl.where(usable, quotient, 1.0)
    for column in range(0, size, LANES):
        here = (group < groups) & (column + lane < size)
        part = widen(tl.load(x + begin + column + lane, mask=here, other=0.0))
        t = tl.div_rn(part, tl.zeros_like(part) + divisor)
        t = tl.where(usable, t, 0.0)
        if INT8:
            t = tl.minimum(tl.maximum(t, -LARGEST), LARGEST)
            code = ((t + ROUND) - ROUND).to(tl.int32) & 0xFF
            code = tl.where(top < INFINITY, code, 0)
        else:
            length = tl.minimum(float_of(magnitude(t)), LARGEST)
            exponent = tl.maximum(bits_of(length) & INFINITY, E4M3_NORMAL)
            large = exponent + (20 << 23)
            code = bits_of(length + float_of(large)) - large + ((exponent - E4M3_NORMAL) >> 20)
            code |= (bits_of(t) >> 24) & 0x80
            code = tl.where(top < INFINITY, code, 0x7F)
        tl.store(codes + begin + column + lane, code.to(tl.uint8), mask=here)


def run_epilogue(
    sums: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    norm_out: torch.Tensor | None,
    quantized: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """``out`` [..., features] <- (sums + bias) + residual, ``norm_out`` <- its norm, on torch's current stream.

    ``quantized`` (values, scales) <- the norm in 8 bits.
    """
    features, numel = out.shape[-1], out.numel()
    options: dict[str, Any] = {"enable_fp_fusion": False}
    with on_device(out.device):
        if bias is not None or residual is not None:
            grid = (-(-numel // TILE),)
            add_terms[grid](sums, bias, residual, out, numel, features, TILE, num_warps=4, **options)
        if norm_out is None and quantized is not None:
            norm_out = torch.empty_like(out)
        if norm_out is not None:
            rows = numel // features
            norm_rows[(-(-rows // ROWS),)](
                out, weight, norm_out, rows, features, eps, ROWS, LANES, num_warps=2, **options
            )
        if quantized is not None:
            values, scales = quantized
            groups = scales.numel()
            codes, to_int8 = values.view(torch.uint8), values.dtype == torch.int8
            quantize_groups[(-(-groups // ROWS),)](
                norm_out, codes, scales, groups, numel // groups, to_int8, ROWS, LANES, num_warps=2, **options
            )
