"""The kernel of codecs fp16 and bf16, for every verb. Their payloads are one run of 16-bit floats."""

from __future__ import annotations

import triton
import triton.language as tl

from dtcomm.kernels.triton.floats import INFINITY, canonical, magnitude, narrow, widen


@triton.jit
def _join(a, b, OP: tl.constexpr):
    """The reduction of `a` and `b`: NaN wins; of equal values the first stays."""
    if OP == "sum":
        a += b
    elif OP == "min":
        a = tl.where((b < a) | (b != b), b, a)
    else:
        a = tl.where((b > a) | (b != b), b, a)
    return a


@triton.jit
def _payload(payload, i, here, WIRE: tl.constexpr):
    return canonical(widen(tl.load(payload.to(tl.pointer_type(WIRE)) + i, mask=here)))


@triton.jit
def _tile(
    payloads,
    before,
    local,
    residual,
    error,
    payload_out,
    out,
    start,
    left,
    divisor,
    WIRE: tl.constexpr,
    OP: tl.constexpr,
    POSITION: tl.constexpr,
    DIVIDES: tl.constexpr,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
):
    """TILE elements from `start` on; with CUT only the `left` remaining ones."""
    COUNT: tl.constexpr = len(payloads)
    LOCAL: tl.constexpr = (local is not None) or (residual is not None)
    LONE: tl.constexpr = COUNT == 0 and residual is None and before is None and not DIVIDES
    i = tl.arange(0, TILE)
    if CUT:
        left = left.to(tl.int32)
        here = i < left
    else:
        here = None
    if residual is not None:
        added = tl.load(residual + start + i, mask=here)
    if error is not None:
        old = added if residual is not None else tl.load(error + start + i, mask=here)
    if local is not None:
        mine = widen(tl.load(local + start + i, mask=here))
        if residual is not None:
            mine += added
    elif residual is not None:
        mine = added

    if before is not None:
        total = tl.load(before + start + i, mask=here)
    for t in tl.static_range(COUNT + 1):
        if LOCAL and POSITION == t:
            if t == 0 and before is None:
                total = mine
            else:
                total = _join(total, mine, OP)
        if t < COUNT:
            if t == 0 and not (LOCAL and POSITION == 0) and before is None:
                total = _payload(payloads[t], start + i, here, WIRE)
            else:
                total = _join(total, _payload(payloads[t], start + i, here, WIRE), OP)
    if DIVIDES:
        total = tl.div_rn(total, tl.zeros_like(total) + divisor)

    if payload_out is None:
        if out is not None:
            # A single term is copied, so NaN keeps its bits.
            if not (LONE and out.dtype.element_ty == tl.float32):
                total = narrow(total, out.dtype.element_ty)
            tl.store(out + start + i, total, mask=here)
        if error is not None:
            tl.store(error + start + i, tl.zeros_like(total).to(tl.float32), mask=here)
    else:
        wire = narrow(total, WIRE)
        target = payload_out.to(tl.pointer_type(WIRE)) + start + i
        if CUT:
            padded = (left + 7) // 8 * 8  # halves of 16 bytes
            tl.store(target, tl.where(here, wire, tl.zeros_like(wire)), mask=i < padded)
        else:
            tl.store(target, wire)
        decoded = canonical(widen(wire))
        if error is not None:
            lost = total - decoded
            if DIVIDES:
                lost *= divisor
            tl.store(error + start + i, tl.where(magnitude(lost) < INFINITY, lost, old), mask=here)
        if out is not None:
            tl.store(out + start + i, narrow(decoded, out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["numel"])
def combine_casts(
    payloads,
    before,
    local,
    residual,
    error,
    payload_out,
    out,
    numel: tl.int64,
    divisor: tl.float32,
    WIRE: tl.constexpr,
    OP: tl.constexpr,
    POSITION: tl.constexpr,
    DIVIDES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Runs a :class:`~dtcomm.kernels.types.Combine`, TILE elements per program; absent tensors are None.

    `payloads` is a tuple; the local term, local + residual, stands before payloads[POSITION]; `before` (fp32) is the
    sum of earlier terms; `error` is the residual that is overwritten. Whole tiles use no masks: masked loads and stores
    are vectorized only if the length is a multiple of the vector.
    """
    start = tl.program_id(0).to(tl.int64) * TILE
    left = numel - start
    if left >= TILE:
        _tile(
            payloads, before, local, residual, error, payload_out, out, start, left, divisor,
            WIRE, OP, POSITION, DIVIDES, TILE, False,
        )  # fmt: skip
    else:
        _tile(
            payloads, before, local, residual, error, payload_out, out, start, left, divisor,
            WIRE, OP, POSITION, DIVIDES, TILE, True,
        )  # fmt: skip
