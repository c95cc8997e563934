"""The epilogue of CUDA tensors (`dtcomm.kernels.epilogue`) in Triton, with the bytes of csrc/cpu/epilogue.h.

It takes longer to import than dtcomm, so it is imported when it first runs. Magnitudes are int32 with the sign
cleared, so that they compare as docs/reference/wire-format.md orders them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from dtcomm.kernels.calls import EpilogueCall

INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even
E4M3_NORMAL = tl.constexpr(121 << 23)  # bits of 2^-6, the smallest normal number
TILE = 2048  # elements of a program that adds
# Squares are added as on the CPU: element i of a row to lane i mod 16, lanes then in halves.
LANES = 16
ROWS = 32  # of a program: its loads are of LANES elements a row


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    return bits_of(x) & 0x7FFFFFFF


@triton.jit
def canonical(x):
    """`x` with every NaN replaced by the canonical one."""
    return float_of(tl.where(magnitude(x) > INFINITY, NAN, bits_of(x)))


@triton.jit
def widen(x):
    """fp32, fp16 or bf16 as fp32. The bits of a NaN are kept, as in a widening by integer operations."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        half = x.to(tl.uint16, bitcast=True).to(tl.int32)
        size = half & 0x7FFF
        nan = ((half & 0x8000) << 16) | ((size << 13) + (224 << 23)) | 0x400000
        x = float_of(tl.where(size > 0x7C00, nan, bits_of(x.to(tl.float32))))
    return x


@triton.jit
def narrow(x, type: tl.constexpr):
    """fp32 cast to `type`: to nearest, ties to even, subnormals kept; every NaN becomes the canonical one."""
    if type == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(magnitude(x) > INFINITY, 0x7FC0, half)
        x = half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif type == tl.float16:
        half = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        half = tl.where(magnitude(x) > INFINITY, 0x7E00, half)
        x = half.to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        x = canonical(x)
    return x


@triton.jit(do_not_specialize=["numel", "features"])
def add_terms(sums, bias, addend, out, numel: tl.int64, features: tl.int64, TILE: tl.constexpr):
    """``out`` <- (sums + bias) + addend; absent tensors are None."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    i = begin + tl.arange(0, TILE)
    here = i < numel
    x = widen(tl.load(sums + i, mask=here))
    if bias is not None:
        # One long division a program, short ones for its elements.
        column = ((begin % features).to(tl.int32) + tl.arange(0, TILE)) % features.to(tl.int32)
        x += widen(tl.load(bias + column, mask=here))
    if addend is not None:
        x += widen(tl.load(addend + i, mask=here))
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


def run_epilogue(sums: torch.Tensor, call: EpilogueCall) -> None:
    """``out`` [..., features] <- (sums + bias) + addend, then its norm, on torch's current stream."""
    out = call.out
    features, numel = out.shape[-1], out.numel()
    options: dict[str, Any] = {"enable_fp_fusion": False}
    # Triton launches on torch's current device; a CPU tensor is for its interpreter.
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        if call.adds:
            grid = (-(-numel // TILE),)
            add_terms[grid](sums, call.bias, call.addend, out, numel, features, TILE, num_warps=4, **options)
        if not call.has_norm:
            return
        norm_out = torch.empty_like(out) if call.norm_out is None else call.norm_out
        rows = numel // features
        norm_rows[(-(-rows // ROWS),)](
            out, call.weight, norm_out, rows, features, call.eps, ROWS, LANES, num_warps=2, **options
        )
        if call.codes is not None and call.scales is not None:
            groups = call.scales.numel()
            codes, to_int8 = call.codes.view(torch.uint8), call.codes.dtype == torch.int8
            quantize_groups[(-(-groups // ROWS),)](
                norm_out,
                codes,
                call.scales,
                groups,
                numel // groups,
                to_int8,
                ROWS,
                LANES,
                num_warps=2,
                **options,
            )
