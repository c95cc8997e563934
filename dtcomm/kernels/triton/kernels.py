"""The kernels of every verb: one for codecs whose blocks share a scale, one for the casts fp16 and bf16.

A program takes TILE elements. Blocks are rows of a tile, which has whole granules; places within it are int32. All
that differs between block codecs is in RULES, a :class:`~dtcomm.kernels.triton.Rules`, which is None for casts. The
payload of a cast is one run of 16-bit floats of type WIRE, which is None for blocks. Both are known when a kernel is
compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dtcomm.kernels.triton.floats import (
    INFINITY,
    NAN,
    SMALLEST,
    bits_of,
    canonical,
    float_of,
    magnitude,
    narrow,
    narrow_at_random,
    uniform,
    widen,
)

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even
ROUND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def scale_bits(top, bad, RULES: tl.constexpr):
    """The bits of top / levels in the scale's type: 0 for zero blocks, NaN if `bad`. `top`: the largest magnitude."""
    bits = bits_of(tl.div_rn(float_of(top), tl.full(top.shape, RULES.levels, tl.float32)))
    if RULES.narrow:
        if RULES.up:
            bits = (bits + 0xFFFF) & -0x10000
        else:
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    bits = tl.minimum(bits, RULES.cap)
    bits = tl.where(bits < SMALLEST, 0, bits)
    return tl.where(bad, NAN, bits)


@triton.jit
def inverse(scale):
    """The factors that turn elements into codes, from the bits of scales: 0 for zero blocks and NaN blocks."""
    usable = (scale > 0) & (scale < INFINITY)
    by = float_of(tl.where(usable, scale, 0x3F800000))
    return tl.where(usable, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), by), 0.0)


@triton.jit
def zero_point(lowest, RULES: tl.constexpr):
    """`lowest` rounded towards -Inf to the scale's type, but never to -Inf; -0 becomes +0."""
    bits = bits_of(lowest)
    if RULES.narrow:
        cut = bits & -0x10000
        away = (bits != cut) & (bits < 0) & (cut != -0x810000)  # 0xff7f0000: the largest negative number
        bits = tl.where(away, cut + 0x10000, cut)
    return float_of(tl.where(bits == -0x80000000, 0, bits))


@triton.jit
def encode_code(t, key_low, key_high, start, i, RULES: tl.constexpr):
    """The int32 codes of elements over their scale; `start` + i are their indices in the caller's tensor."""
    if RULES.mantissa:
        size = tl.minimum(float_of(bits_of(t) & 0x7FFFFFFF), RULES.levels)
        # The exponent of the element's binade. Subnormal numbers have the unit of the smallest normal binade.
        exponent = tl.maximum(bits_of(size) & INFINITY, RULES.normal)
        if RULES.stochastic:
            # Over the unit, a power of two: exact.
            units = size * float_of(((127 + RULES.mantissa) << 23) + (0x3F800000 - exponent))
            floor = units.to(tl.int32)
            floor += (uniform(key_low, key_high, start, i) < units - floor.to(tl.float32)).to(tl.int32)
        else:
            # A number whose last place is the unit: adding it rounds, and the sum's last bits count the units.
            large = exponent + ((23 - RULES.mantissa) << 23)
            floor = bits_of(size + float_of(large)) - large
        codes = (floor + ((exponent - RULES.normal) >> (23 - RULES.mantissa))) | ((bits_of(t) >> 24) & 0x80)
    else:
        LOWEST: tl.constexpr = -RULES.levels if RULES.symmetric else 0.0
        t = tl.minimum(tl.maximum(t, LOWEST), RULES.levels)
        if RULES.stochastic:
            cut = t.to(tl.int32)
            codes = cut - (cut.to(tl.float32) > t).to(tl.int32)
            codes += (uniform(key_low, key_high, start, i) < t - codes.to(tl.float32)).to(tl.int32)
        else:
            codes = bits_of(t + ROUND) - ROUND_BITS
    return codes


@triton.jit
def decode_code(codes, RULES: tl.constexpr):
    """The values of codes (int32), before the scale."""
    if RULES.mantissa:
        size = codes & 0x7F
        UNIT_BITS: tl.constexpr = RULES.normal - (RULES.mantissa << 23)  # of the step of subnormal numbers
        unit = float_of(tl.full(size.shape, UNIT_BITS, tl.int32))
        normal = (size << (23 - RULES.mantissa)) + (RULES.normal - (1 << 23))
        bits = tl.where(size < (1 << RULES.mantissa), bits_of(size.to(tl.float32) * unit), normal)
        bits = tl.where(size == 0x7F, NAN, bits)
        values = float_of(bits | ((codes & 0x80) << 24))
    else:
        values = codes.to(tl.float32)
    return values


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
        if RULES.symmetric and RULES.mantissa == 0:
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
def _decode_blocks(payload, scale_at, zero_at, codes_at, rows, RULES: tl.constexpr):
    scale = _load_field(payload, scale_at, rows, RULES)
    values = decode_code(_load_codes(payload, codes_at, rows, RULES), RULES) * scale
    if not RULES.symmetric:
        values = _load_field(payload, zero_at, rows, RULES) + values
    return canonical(values)


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
def _decode_cast(payload, i, here, WIRE: tl.constexpr):
    return canonical(widen(tl.load(payload.to(tl.pointer_type(WIRE)) + i, mask=here)))


@triton.jit
def _encode_cast(
    total,
    payload_out,
    start,
    i,
    left,
    here,
    key_low,
    key_high,
    index,
    WIRE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CUT: tl.constexpr,
):
    """Encode `total` into `payload_out`; the decoded floats. `index` is that of the tile's first element."""
    if STOCHASTIC:
        wire = narrow_at_random(total, uniform(key_low, key_high, index, i))
    else:
        wire = narrow(total, WIRE)
    target = payload_out.to(tl.pointer_type(WIRE)) + start + i
    if CUT:
        padded = (left + 7) // 8 * 8  # halves of 16 bytes
        tl.store(target, tl.where(here, wire, tl.zeros_like(wire)), mask=i < padded)
    else:
        tl.store(target, wire)
    return canonical(widen(wire))


@triton.jit
def _encode_blocks(
    total,
    target,
    head,
    scale_at,
    zero_at,
    codes_at,
    block,
    blocks,
    rows,
    here,
    key_low,
    key_high,
    index,
    i,
    RULES: tl.constexpr,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
):
    """Encode `total` into the granules at `target`; the decoded floats. `index` is that of the tile's first element."""
    PER_GRANULE: tl.constexpr = RULES.granule // RULES.block
    BLOCK_BYTES: tl.constexpr = RULES.field_bytes * RULES.fields + RULES.block * RULES.bits // 8
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
    codes = encode_code(shifted * inverse(scale), key_low, key_high, index, i, RULES)
    # Codes of zero blocks are zeros already, except for -0 in float formats; missing elements get zero codes.
    codes = tl.where(bad | (scale == 0), 0, codes)
    if CUT:
        codes = tl.where(here, codes, 0)

    _store_field(target, scale_at, scale, rows, RULES)
    if not RULES.symmetric:
        _store_field(target, zero_at, bits_of(zero), rows, RULES)
    _store_codes(target, codes_at, codes, rows, RULES)
    USED: tl.constexpr = PER_GRANULE * BLOCK_BYTES
    pad = tl.arange(0, 16)[None, :]
    if CUT:
        # Behind the last block of each granule.
        end = blocks * BLOCK_BYTES
        last = rows & (block == blocks - 1)
        tl.store(target + head + end + pad, tl.zeros_like(pad).to(tl.uint8), mask=last & (pad < (-end) & 15))
    elif USED < RULES.bytes:
        behind = tl.arange(0, TILE // RULES.granule)[:, None] * RULES.bytes + USED + pad
        tl.store(target + behind, tl.zeros_like(behind).to(tl.uint8), mask=pad < RULES.bytes - USED)

    decoded = decode_code(codes, RULES) * float_of(scale)
    if not RULES.symmetric:
        decoded = zero + decoded
    return decoded


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
    WIRE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    OP: tl.constexpr,
    POSITION: tl.constexpr,
    DIVIDES: tl.constexpr,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
):
    """The elements of a tile; with CUT only the `left` remaining ones."""
    COUNT: tl.constexpr = len(payloads)
    LOCAL: tl.constexpr = (local is not None) or (residual is not None)
    LONE: tl.constexpr = COUNT == 0 and residual is None and before is None and not DIVIDES
    start = tile * TILE
    here, rows = None, None
    if CUT:
        left = left.to(tl.int32)
    if RULES is None:
        i = tl.arange(0, TILE)
        if CUT:
            here = i < left
    else:
        PER_GRANULE: tl.constexpr = RULES.granule // RULES.block
        row = tl.arange(0, TILE // RULES.block)[:, None]
        i = row * RULES.block + tl.arange(0, RULES.block)[None, :]
        granule, block = row // PER_GRANULE, row % PER_GRANULE
        blocks = PER_GRANULE
        if CUT:
            here = i < left
            rows = row * RULES.block < left
            cut = tl.minimum(left - granule * RULES.granule, RULES.granule)
            blocks = (cut + RULES.block - 1) // RULES.block
        # Byte offsets in a tile.
        at = tile * (TILE // RULES.granule * RULES.bytes)
        head = granule * RULES.bytes
        scale_at = head + block * RULES.field_bytes
        zero_at = scale_at + blocks * RULES.field_bytes
        codes_at = (
            head + blocks * (RULES.field_bytes * RULES.fields) + block * (RULES.block * RULES.bits // 8)
        )

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
            if RULES is None:
                term = _decode_cast(payloads[t], start + i, here, WIRE)
            else:
                term = _decode_blocks(payloads[t] + at, scale_at, zero_at, codes_at, rows, RULES)
            if t == 0 and not (LOCAL and POSITION == 0) and before is None:
                total = term
            else:
                total = _join(total, term, OP)
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
        if RULES is None:
            decoded = _encode_cast(
                total, payload_out, start, i, left, here, key_low, key_high, offset + start.to(tl.uint64),
                WIRE, STOCHASTIC, CUT,
            )  # fmt: skip
        else:
            decoded = _encode_blocks(
                total, payload_out + at, head, scale_at, zero_at, codes_at, block, blocks, rows, here,
                key_low, key_high, offset + start.to(tl.uint64), i, RULES, TILE, CUT,
            )  # fmt: skip
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
    """Runs a :class:`~dtcomm.kernels.calls.Combine`, TILE elements per program; absent tensors are None.

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
            RULES, None, False, "sum", POSITION, DIVIDES, TILE, False,
        )  # fmt: skip
    else:
        _tile(
            payloads, before, local, residual, error, payload_out, out, tile, left, divisor, key_low, key_high, offset,
            RULES, None, False, "sum", POSITION, DIVIDES, TILE, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "key_low", "key_high", "offset"])
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
    key_low: tl.uint32,
    key_high: tl.uint32,
    offset: tl.uint64,
    WIRE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    OP: tl.constexpr,
    POSITION: tl.constexpr,
    DIVIDES: tl.constexpr,
    TILE: tl.constexpr,
):
    """:func:`combine_blocks` for casts, with the reductions sum, min and max."""
    tile = tl.program_id(0).to(tl.int64)
    left = numel - tile * TILE
    key_low, key_high, offset = key_low.to(tl.uint32), key_high.to(tl.uint32), offset.to(tl.uint64)
    if left >= TILE:
        _tile(
            payloads, before, local, residual, error, payload_out, out, tile, left, divisor, key_low, key_high, offset,
            None, WIRE, STOCHASTIC, OP, POSITION, DIVIDES, TILE, False,
        )  # fmt: skip
    else:
        _tile(
            payloads, before, local, residual, error, payload_out, out, tile, left, divisor, key_low, key_high, offset,
            None, WIRE, STOCHASTIC, OP, POSITION, DIVIDES, TILE, True,
        )  # fmt: skip


# The epilogue, with the bytes of csrc/cpu/epilogue.h. Squares are added as there: element i of a row to lane i mod 16,
# lanes then in halves; every product is rounded.
LANES = 16
E4M3_NORMAL = tl.constexpr(121 << 23)  # bits of 2^-6, the smallest normal number
ROWS = 32  # of a program: its loads are of LANES elements a row


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
