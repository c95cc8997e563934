// Codec `exact`: blocks of integers with a common power of two. Integers with the same exponents add up without loss,
// in any order, as long as there is room for the carries; so ranks agree on the exponents first.
// docs/guides/reproducible-sums.md explains the arithmetic. It is done in fp64, where the product of a float and a
// power of two, and rounding it to an integer, are exact.
#pragma once

#include <cstddef>

#include "codec/counter_rng.h"
#include "codec/float_bits.h"

namespace dtcomm {

constexpr std::uint8_t kNaNBlock = 255;

// The bits that each integer leaves free so that a sum over `ranks` ranks does not overflow: log2, rounded up.
DTCOMM_HD int headroom(std::size_t ranks) {
  int bits = 0;
  while ((std::size_t{1} << bits) < ranks) ++bits;
  return bits;
}

// The bits of an integer's magnitude.
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

// The exponent of the block's unit: integer 1 stands for 2 to the power of the result.
DTCOMM_HD int unit_exponent(std::uint8_t exponent, int digits) { return exponent - 126 - digits; }

// The largest integer of `digits` bits.
DTCOMM_HD double largest_integer(int digits) { return power_of_two(digits) - 1.0; }

// x / unit rounded to the nearest integer, ties to even, and clamped to +-`most`; for NaN an arbitrary integer. Adding
// and subtracting 1.5 * 2^52 rounds.
DTCOMM_HD double to_integer(float x, double per_unit, double most) {
  double t = static_cast<double>(x) * per_unit;
  t = t > -most ? t : -most;
  t = t < most ? t : most;
  return (t + 0x1.8p52) - 0x1.8p52;
}

// The weight of element `index` of a tensor in the checksum of its run: odd, so that any change of one integer shows.
constexpr std::size_t kAuditRun = 4096;  // elements that share a checksum
DTCOMM_HD std::uint64_t audit_weight(std::uint32_t index) { return static_cast<std::uint64_t>(mix32(index)) << 1 | 1U; }

}  // namespace dtcomm
