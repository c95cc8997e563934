// exact: blocks of integers under a common power of two. Integers of one grid add up without loss, in any order, as
// long as there is room for the carries; ranks that are to add theirs agree on the grid first.
// docs/guides/reproducible-sums.md has the arithmetic. Arithmetic is in fp64, where a float times a power of two, and
// its rounding to an integer, are exact.
#pragma once

#include <cstddef>

#include "codec/counter_rng.h"
#include "codec/float_bits.h"

namespace dtcomm {

constexpr std::uint8_t kNaNBlock = 255;

// Bits that the integers of each of `ranks` ranks leave free, so that no sum overflows: log2, rounded up.
DTCOMM_HD int headroom(std::size_t ranks) {
  int bits = 0;
  while ((std::size_t{1} << bits) < ranks) ++bits;
  return bits;
}

// Digits of an integer's magnitude.
DTCOMM_HD int digits_of(int bits, std::size_t ranks) { return bits - 1 - headroom(ranks); }

// The exponent of a block whose largest magnitude has the bits `top`: every element is below 2^(exponent - 126).
DTCOMM_HD std::uint8_t exponent_of(std::uint32_t top) {
  if (top >= kInfinity32) return kNaNBlock;
  const std::uint32_t exponent = top >> 23;
  return static_cast<std::uint8_t>(exponent == 0 && top != 0 ? 1 : exponent);
}

DTCOMM_HD double power_of_two(int exponent) {
  const std::uint64_t bits = static_cast<std::uint64_t>(exponent + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// What an integer 1 of the block stands for is 2 to the power of this.
DTCOMM_HD int unit_of(std::uint8_t exponent, int digits) { return exponent - 126 - digits; }

// The largest integer: one less than would be a bit more.
DTCOMM_HD double most_of(int digits) { return power_of_two(digits) - 1.0; }

// x / unit to the nearest integer, ties to even, at most `most`; of NaN some integer. Adding and taking away
// 1.5 * 2^52 rounds.
DTCOMM_HD double on_grid(float x, double per_unit, double most) {
  double t = static_cast<double>(x) * per_unit;
  t = t > -most ? t : -most;
  t = t < most ? t : most;
  return (t + 0x1.8p52) - 0x1.8p52;
}

// What element `index` of a tensor counts in the checksum of its run: odd, so that no change of one integer is lost.
constexpr std::size_t kAuditRun = 4096;  // elements that share a checksum
DTCOMM_HD std::uint64_t audit_weight(std::uint32_t index) { return static_cast<std::uint64_t>(mix32(index)) << 1 | 1U; }

}  // namespace dtcomm
