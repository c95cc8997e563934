// Correctly rounded sums: four neighbouring threads have a block of elements, each a vec8 of it.
#pragma once

#include "cuda/rounded_sum.h"
#include "cuda/vec8.cuh"

namespace dtcomm::cuda {

constexpr unsigned kBlockLanes = kRoundedBlock / kVec8;

DTCOMM_HD std::uint64_t rounded_blocks(std::uint64_t numel) { return (numel + kRoundedBlock - 1) / kRoundedBlock; }

// Thread blocks of `threads` threads that a tensor takes.
inline std::uint64_t rounded_tiles(std::uint64_t numel, unsigned threads) {
  return (rounded_blocks(numel) * kBlockLanes + threads - 1) / threads;
}

// The part of a thread.
struct RoundedPosition {
  std::uint64_t first, block;
  unsigned lane;  // among those of the block
  int present;
};

template <class Lanes>
DTCOMM_DEVICE RoundedPosition rounded_position(const Lanes& lanes, std::uint64_t numel, std::uint64_t tile) {
  const std::uint64_t index = tile * lanes.threads() + lanes.thread(), first = index * kVec8;
  const std::uint64_t left = first < numel ? numel - first : 0;
  return {first, index / kBlockLanes, static_cast<unsigned>(index % kBlockLanes),
          left < kVec8 ? static_cast<int>(left) : kVec8};
}

DTCOMM_DEVICE unsigned halves_at(const SumDigits& sum, std::uint64_t block) {
  return halves_of(span_of(sum.tops[block], sum.lows[block]), digits_of(32, sum.ranks), digits_of(16, sum.ranks));
}

// How a block's digits lie in memory.
struct DigitRows {
  int span, position, bits;
  unsigned whole, half;  // rows of 32-bit digits, and of 16-bit ones
  std::uint64_t at;      // of the first digit, in integers
};

// Of block `block` of a run of blocks that begins at block `first`; without any rows if it is `absent`.
DTCOMM_DEVICE DigitRows digit_rows(const SumDigits& sum, const std::int64_t* ends, std::uint64_t first,
                                   std::uint64_t block, bool absent) {
  DigitRows rows = {};
  if (absent) return rows;
  const unsigned halves = halves_at(sum, block);
  rows.span = span_of(sum.tops[block], sum.lows[block]);
  rows.position = position_of(sum.lows[block]);
  rows.bits = digits_of(32, sum.ranks);
  rows.whole = halves / 2;
  rows.half = halves % 2;
  rows.at = static_cast<std::uint64_t>(ends[block] - halves - (ends[first] - halves_at(sum, first))) * kHalfBlock;
  return rows;
}

DTCOMM_DEVICE void load_integers(const std::int32_t* from, std::int32_t (&to)[kVec8]) {
  DTCOMM_UNROLL
  for (int q = 0; q < 2; ++q) {
    const Quad quad = load_quad(from + 4 * q);
    DTCOMM_UNROLL
    for (int j = 0; j < 4; ++j) to[4 * q + j] = static_cast<std::int32_t>(quad.word[j]);
  }
}

DTCOMM_DEVICE void store_integers(const std::int32_t (&from)[kVec8], std::int32_t* to) {
  DTCOMM_UNROLL
  for (int q = 0; q < 2; ++q) {
    Quad quad;
    DTCOMM_UNROLL
    for (int j = 0; j < 4; ++j) quad.word[j] = static_cast<std::uint32_t>(from[4 * q + j]);
    store_quad(quad, to + 4 * q);
  }
}

template <class Lanes>
DTCOMM_DEVICE void measure_tile(const Lanes& lanes, const MeasureCall& call, std::uint64_t tile) {
  const RoundedPosition at = rounded_position(lanes, call.numel, tile);
  float x[kVec8];
  load_vec8(call.dtype, call.from, at.first, at.present, aligned_to(call.from, sizeof(Quad)), x);
  std::uint32_t top = 0, smallest = 0xffffffff, fractions = 0;
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const std::uint32_t size = call.finite_only && !finite(x[j]) ? 0 : magnitude(x[j]);
    const std::uint32_t before = size - 1;  // of zeros it is the largest
    top = size > top ? size : top;
    smallest = before < smallest ? before : smallest;
    fractions |= size;
  }
  top = group_reduce(lanes, kBlockLanes, top, [](std::uint32_t a, std::uint32_t b) { return a > b ? a : b; });
  smallest = group_reduce(lanes, kBlockLanes, smallest, [](std::uint32_t a, std::uint32_t b) { return a < b ? a : b; });
  fractions = group_reduce(lanes, kBlockLanes, fractions, [](std::uint32_t a, std::uint32_t b) { return a | b; });
  if (at.lane != 0 || at.present == 0) return;
  call.tops[at.block] = exponent_of(top);
  call.lows[at.block] = low_of(top, smallest + 1, fractions);
}

DTCOMM_DEVICE void count_block(const CountCall& call, std::uint64_t block) {
  if (block < call.blocks) call.halves[block] = static_cast<std::int32_t>(halves_at(call.sum, block));
}

// The binary digits from `from` on, `bits` of them, of mantissa * 2^shift, an integer.
DTCOMM_DEVICE std::int32_t digit_at(std::uint32_t mantissa, int shift, int from, int bits) {
  const int by = shift - from;
  const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
  if (by >= bits || by <= -24) return 0;
  const std::uint64_t units = by >= 0 ? static_cast<std::uint64_t>(mantissa) << by : mantissa >> -by;
  return static_cast<std::int32_t>(units & mask);
}

template <class Lanes>
DTCOMM_DEVICE void split_tile(const Lanes& lanes, const SplitCall& call, std::uint64_t tiles, std::uint64_t tile) {
  const std::uint64_t part = tile / tiles, blocks = rounded_blocks(call.numel);
  const RoundedPosition at = rounded_position(lanes, call.numel, tile % tiles);
  const auto* from = static_cast<const std::uint8_t*>(call.from) + part * call.numel * size_of(call.dtype);
  float x[kVec8];
  load_vec8(call.dtype, from, at.first, at.present, aligned_to(from, sizeof(Quad)), x);
  const std::uint64_t first = part * blocks;
  const DigitRows rows = digit_rows(call.sum, call.ends, first, first + at.block, at.block >= blocks);
  std::int32_t* to = call.digits + call.offsets[part] + rows.at;
  std::uint32_t mantissa[kVec8];
  int shift[kVec8];
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const std::uint32_t size = finite(x[j]) ? magnitude(x[j]) : 0, exponent = size >> 23;
    mantissa[j] = (size & 0x7fffff) | (exponent == 0 ? 0 : 0x800000);
    shift[j] = kLowestPosition + static_cast<int>(exponent == 0 ? 0 : exponent - 1) - rows.position;
  }
  const auto take = [&](unsigned row, std::int32_t (&digits)[kVec8]) {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      const std::int32_t digit = digit_at(mantissa[j], shift[j], static_cast<int>(row) * rows.bits, rows.bits);
      digits[j] = x[j] < 0 ? -digit : digit;
    }
  };
  std::int32_t digits[kVec8];
  DTCOMM_LOOP
  for (unsigned row = 0; row < rows.whole; ++row) {
    take(row, digits);
    store_integers(digits, to + row * kRoundedBlock + at.lane * kVec8);
  }
  if (!rows.half) {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) digits[j] = 0;
  } else {
    take(rows.whole, digits);
  }
  std::int32_t words[kVec8];
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const auto low = static_cast<std::uint32_t>(digits[j]);
    const auto high = static_cast<std::uint32_t>(lanes.shuffle_xor(digits[j], kBlockLanes / 2));
    words[j] = static_cast<std::int32_t>(low + (high << 16));
  }
  if (rows.half && at.lane < kBlockLanes / 2) {
    store_integers(words, to + rows.whole * kRoundedBlock + at.lane * kVec8);
  }
}

template <class Lanes>
DTCOMM_DEVICE void round_tile(const Lanes& lanes, const RoundCall& call, std::uint64_t tile) {
  const RoundedPosition at = rounded_position(lanes, call.numel, tile);
  const DigitRows rows = digit_rows(call.sum, call.ends, 0, at.block, at.block >= rounded_blocks(call.numel));
  const std::int32_t* from = call.digits + rows.at;
  std::int32_t high[kVec8] = {};
  if (rows.half) {
    load_integers(from + rows.whole * kRoundedBlock + at.lane % (kBlockLanes / 2) * kVec8, high);
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      const std::int32_t low = static_cast<std::int16_t>(high[j]);
      high[j] = at.lane < kBlockLanes / 2 ? low : (high[j] - low) >> 16;
    }
  }
  from += at.lane * kVec8;
  double value[kVec8];
  if (rows.span + headroom(call.sum.ranks) <= 53) {  // fp64 holds the sum
    std::int64_t sums[kVec8];
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) sums[j] = high[j];
    DTCOMM_LOOP
    for (unsigned row = rows.whole; row-- > 0;) {
      std::int32_t digits[kVec8];
      load_integers(from + row * kRoundedBlock, digits);
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) sums[j] = sums[j] * (std::int64_t{1} << rows.bits) + digits[j];
    }
    const double unit = power_of_two(rows.position), divisor = static_cast<double>(call.divisor);
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      value[j] = static_cast<double>(sums[j]) * unit;
      if (call.divisor > 1) value[j] /= divisor;
    }
  } else {
    std::int64_t digits[kMostDigits];
    DTCOMM_LOOP
    for (int j = 0; j < kVec8; ++j) {
      for (unsigned row = 0; row < rows.whole; ++row)
        digits[row] = from[row * kRoundedBlock + static_cast<unsigned>(j)];
      if (rows.half) digits[rows.whole] = high[j];
      value[j] = value_of_digits(digits, rows.whole + rows.half, rows.bits, rows.position, call.divisor);
    }
  }
  float x[kVec8];
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    x[j] = call.dtype == DType::f32 ? static_cast<float>(value[j]) : round_to_odd(value[j]);
  }
  const std::uint64_t end = (at.first / (kWarp * kVec8) + 1) * kWarp * kVec8;
  store_vec8(lanes, call.dtype, x, call.out, at.first, at.present, aligned_to(call.out, sizeof(Quad)),
             end <= call.numel);
}

}  // namespace dtcomm::cuda
