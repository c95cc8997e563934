"""Formats of blocks that share a scale: one kernel for every verb.

A program takes TILE elements, whole granules, as rows of a block each; places within it are int32. All that
differs between codecs is in RULES, a :class:`~dtcomm.kernels.triton.codec_constants.Rules`, known when it is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dtcomm.kernels.triton.floats import INFINITY, bits_of, canonical, float_of, magnitude, narrow, widen
from dtcomm.kernels.triton.quantize import decode_code, encode_code, inverse, scale_bits, zero_point


@triton.jit
def _load_field(payload, at, here, RULES: tl.constexpr):
    if RULES.narrow:
        half = tl.load((payload + at).to(tl.pointer_type(tl.uint16)), mask=here)
        field = (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        field = tl.load((payload + at).to(tl.pointer_type(tl.float32)), mask=here)
    return field


@triton.jit
def _store_field(payload, at, bits, here, RULES: tl.constexpr):
    if RULES.narrow:
        half = (bits.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        tl.store((payload + at).to(tl.pointer_type(tl.uint16)), half, mask=here)
    else:
        tl.store((payload + at).to(tl.pointer_type(tl.int32)), bits, mask=here)


@triton.jit
def _load_codes(payload, at, rows, RULES: tl.constexpr):
    """The codes of rows, whose bytes start at `at`, as int32."""
    if RULES.bits == 4:
        pairs = tl.load(payload + at + tl.arange(0, RULES.block // 2)[None, :], mask=rows)
        codes = tl.join(pairs & 15, pairs >> 4).reshape(pairs.shape[0], RULES.block).to(tl.int32)
        if RULES.symmetric:
            codes = (codes ^ 8) - 8
    else:
        codes = tl.load(payload + at + tl.arange(0, RULES.block)[None, :], mask=rows)
        if RULES.symmetric and not RULES.float8:
            codes = codes.to(tl.int8, bitcast=True)
        codes = codes.to(tl.int32)
    return codes


@triton.jit
def _store_codes(payload, at, codes, rows, RULES: tl.constexpr):
    if RULES.bits == 4:
        low, high = tl.split((codes & 15).to(tl.uint8).reshape(codes.shape[0], RULES.block // 2, 2))
        tl.store(payload + at + tl.arange(0, RULES.block // 2)[None, :], low | (high << 4), mask=rows)
    else:
        tl.store(payload + at + tl.arange(0, RULES.block)[None, :], codes.to(tl.uint8), mask=rows)


@triton.jit
def _payload(payload, scale_at, zero_at, codes_at, rows, RULES: tl.constexpr):
    """The decoded floats of a payload."""
    scale = _load_field(payload, scale_at, rows, RULES)
    values = decode_code(_load_codes(payload, codes_at, rows, RULES), RULES) * scale
    if not RULES.symmetric:
        values = _load_field(payload, zero_at, rows, RULES) + values
    return canonical(values)


@triton.jit
def _tile(
    payloads,
    before,
    local,
    residual,
    error,
    payload_out,
    out,
    tile,
    left,
    divisor,
    key_low,
    key_high,
    offset,
    RULES: tl.constexpr,
    POSITION: tl.constexpr,
    DIVIDES: tl.constexpr,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
):
    """The elements of a tile; with CUT only the `left` remaining ones."""
    COUNT: tl.constexpr = len(payloads)
    LOCAL: tl.constexpr = (local is not None) or (residual is not None)
    LONE: tl.constexpr = COUNT == 0 and residual is None and before is None and not DIVIDES
    PER_GRANULE: tl.constexpr = RULES.granule // RULES.block
    CODE_BYTES: tl.constexpr = RULES.block * RULES.bits // 8  # of a block
    row = tl.arange(0, TILE // RULES.block)[:, None]
    i = row * RULES.block + tl.arange(0, RULES.block)[None, :]
    granule, block = row // PER_GRANULE, row % PER_GRANULE
    blocks = PER_GRANULE
    here, rows = None, None
    if CUT:
        left = left.to(tl.int32)
        here = i < left
        rows = row * RULES.block < left
        cut = tl.minimum(left - granule * RULES.granule, RULES.granule)
        blocks = (cut + RULES.block - 1) // RULES.block
    start = tile * TILE
    # Byte offsets in a tile.
    at = tile * (TILE // RULES.granule * RULES.bytes)
    head = granule * RULES.bytes
    scale_at = head + block * RULES.field_bytes
    zero_at = scale_at + blocks * RULES.field_bytes
    codes_at = head + blocks * (RULES.field_bytes * RULES.fields) + block * CODE_BYTES

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
                total += mine
        if t < COUNT:
            if t == 0 and not (LOCAL and POSITION == 0) and before is None:
                total = _payload(payloads[t] + at, scale_at, zero_at, codes_at, rows, RULES)
            else:
                total += _payload(payloads[t] + at, scale_at, zero_at, codes_at, rows, RULES)
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
        size = magnitude(total)
        if CUT:
            size = tl.where(here, size, 0)
        top = tl.max(size, axis=1, keep_dims=True)
        bad = top >= INFINITY
        shifted = total
        if not RULES.symmetric:
            low, high = total, total
            if CUT:
                low = tl.where(here, total, float("inf"))
                high = tl.where(here, total, float("-inf"))
            zero = zero_point(tl.min(low, axis=1, keep_dims=True), RULES)
            range = magnitude(tl.max(high, axis=1, keep_dims=True) - tl.where(bad, 0.0, zero))
            top = tl.where(bad, top, range)
            bad = top >= INFINITY
            zero = tl.where(bad, 0.0, zero)
            shifted = total - zero
        scale = scale_bits(top, bad, RULES)
        codes = encode_code(
            shifted * inverse(scale), key_low, key_high, offset + start.to(tl.uint64), i, RULES
        )
        # Codes of zero blocks are zeros already, except for -0 in float formats; missing elements get zero codes.
        codes = tl.where(bad | (scale == 0), 0, codes)
        if CUT:
            codes = tl.where(here, codes, 0)

        target = payload_out + at
        _store_field(target, scale_at, scale, rows, RULES)
        if not RULES.symmetric:
            _store_field(target, zero_at, bits_of(zero), rows, RULES)
        _store_codes(target, codes_at, codes, rows, RULES)
        USED: tl.constexpr = PER_GRANULE * (RULES.field_bytes * RULES.fields + CODE_BYTES)
        pad = tl.arange(0, 16)[None, :]
        if CUT:
            # Behind the last block of each granule.
            end = blocks * (RULES.field_bytes * RULES.fields + CODE_BYTES)
            last = rows & (block == blocks - 1)
            tl.store(
                target + head + end + pad, tl.zeros_like(pad).to(tl.uint8), mask=last & (pad < (-end) & 15)
            )
        elif USED < RULES.bytes:
            behind = tl.arange(0, TILE // RULES.granule)[:, None] * RULES.bytes + USED + pad
            tl.store(target + behind, tl.zeros_like(behind).to(tl.uint8), mask=pad < RULES.bytes - USED)

        if error is not None or out is not None:
            decoded = decode_code(codes, RULES) * float_of(scale)
            if not RULES.symmetric:
                decoded = zero + decoded
            if error is not None:
                lost = total - decoded
                if DIVIDES:
                    lost *= divisor
                tl.store(error + start + i, tl.where(magnitude(lost) < INFINITY, lost, old), mask=here)
            if out is not None:
                tl.store(out + start + i, narrow(decoded, out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["numel", "key_low", "key_high", "offset"])
def combine_blocks(
    payloads,
    before,
    local,
    residual,
    error,
    payload_out,
    out,
    numel: tl.int64,
    divisor: tl.float32,
    key_low: tl.uint32,
    key_high: tl.uint32,
    offset: tl.uint64,
    RULES: tl.constexpr,
    POSITION: tl.constexpr,
    DIVIDES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Runs a :class:`~dtcomm.kernels.types.Combine`, TILE elements per program; absent tensors are None.

    `payloads` is a tuple; the local term, local + residual, stands before payloads[POSITION]; `before` (fp32) is the
    sum of earlier terms; `error` is the residual that is overwritten. Whole tiles use no masks: masked loads and stores
    are vectorized only if the length is a multiple of the vector.
    """
    tile = tl.program_id(0).to(tl.int64)
    left = numel - tile * TILE
    key_low, key_high, offset = key_low.to(tl.uint32), key_high.to(tl.uint32), offset.to(tl.uint64)
    if left >= TILE:
        _tile(
            payloads, before, local, residual, error, payload_out, out, tile, left, divisor, key_low, key_high, offset,
            RULES, POSITION, DIVIDES, TILE, False,
        )  # fmt: skip
    else:
        _tile(
            payloads, before, local, residual, error, payload_out, out, tile, left, divisor, key_low, key_high, offset,
            RULES, POSITION, DIVIDES, TILE, True,
        )  # fmt: skip
