// Floats of 8 and of 4 bits, as the elements of float8 and mx: OCP 8-bit Floating Point Specification (OFP8) 1.0, OCP
// Microscaling Formats (MX) 1.0, and e3m4, which no standard has. fp32 arithmetic does the rounding, so there is no
// table and no branch.
#pragma once

#include "codec/float_bits.h"

namespace dtcomm {

// kMantissa: explicit bits. kNormal: fp32 bits of the smallest normal number. kTop: code of kLargest, the largest
// number. kInf: code of Inf; codes above kTop that are not kInf are NaN. A code is below 1 << kSign, which is its sign.
struct E4m3 {
  static constexpr int kMantissa = 3, kSign = 7;
  static constexpr std::uint32_t kNormal = (127U - 6) << 23, kTop = 0x7e, kInf = 0x80, kLargestExponent = 8;
  static constexpr float kLargest = 448.0f;
};

// As e4m3, with a bit of the exponent moved to the mantissa: no Inf, and NaN is the largest code.
struct E3m4 {
  static constexpr int kMantissa = 4, kSign = 7;
  static constexpr std::uint32_t kNormal = (127U - 2) << 23, kTop = 0x7e, kInf = 0x80, kLargestExponent = 4;
  static constexpr float kLargest = 30.0f;
};

struct E5m2 {
  static constexpr int kMantissa = 2, kSign = 7;
  static constexpr std::uint32_t kNormal = (127U - 14) << 23, kTop = 0x7b, kInf = 0x7c, kLargestExponent = 15;
  static constexpr float kLargest = 57344.0f;
};

struct E2m1 {
  static constexpr int kMantissa = 1, kSign = 3;
  static constexpr std::uint32_t kNormal = 127U << 23, kTop = 7, kInf = 8, kLargestExponent = 2;
  static constexpr float kLargest = 6.0f;
};

// The size of a number in units of its last place, and what its code is above that: the exponent of the smallest
// normal number is the least, subnormal numbers share its unit.
template <class F>
DTCOMM_HD std::uint32_t exponent_of(std::uint32_t size) {
  const std::uint32_t exponent = size & kInfinity32;
  return exponent > F::kNormal ? exponent : F::kNormal;
}

// Rounds to nearest, ties to even; numbers beyond the largest one become the largest one.
template <class F>
DTCOMM_HD std::uint32_t nearest_minifloat(float t) {
  const float size = float_of(magnitude(t));
  const float clipped = size < F::kLargest ? size : F::kLargest;
  const std::uint32_t exponent = exponent_of<F>(bits_of(clipped));
  // A number whose last place is the wanted unit: adding it rounds, and the sum's bits grow by the number of units.
  const std::uint32_t large = exponent + (std::uint32_t{23 - F::kMantissa} << 23);
  const std::uint32_t units = bits_of(clipped + float_of(large)) - large;
  const std::uint32_t sign = (bits_of(t) >> (31 - F::kSign)) & (1U << F::kSign);
  return (units + ((exponent - F::kNormal) >> (23 - F::kMantissa))) | sign;
}

// Rounds away from zero with the probability of the distance from the neighbour nearer to zero; `random` is in [0, 1).
// The excess over the largest number is subtracted instead of replaced: compilers would branch on the constant.
template <class F>
DTCOMM_HD std::uint32_t stochastic_minifloat(float t, float random) {
  const std::uint32_t top = bits_of(F::kLargest), size = magnitude(t);
  const std::uint32_t above = size > top ? size - top : 0;
  const std::uint32_t clipped = size - above;
  const std::uint32_t exponent = exponent_of<F>(clipped);
  // 1 / unit, a power of two: the product is exact.
  const float scaled = float_of(clipped) * float_of((std::uint32_t{254 + F::kMantissa} << 23) - exponent);
  const std::int32_t floor = static_cast<std::int32_t>(scaled);
  const std::uint32_t up = random < scaled - static_cast<float>(floor) ? 1 : 0;
  const std::uint32_t units = static_cast<std::uint32_t>(floor) + up;
  const std::uint32_t sign = (bits_of(t) >> (31 - F::kSign)) & (1U << F::kSign);
  return (units + ((exponent - F::kNormal) >> (23 - F::kMantissa))) | sign;
}

// The factor by which fp32 numbers with F's exponents are too small.
template <class F>
DTCOMM_HD float rebias() {
  return float_of(F::kNormal + (126U << 23));
}

// The value of any code, exactly. NaN may have either sign.
template <class F>
DTCOMM_HD float minifloat_value(std::uint32_t code) {
  const std::uint32_t size = code & ((1U << F::kSign) - 1), sign = (code >> F::kSign) << 31;
  // Exponent and mantissa at their places in fp32: too small by the difference of the biases, also if subnormal.
  std::uint32_t bits = bits_of(float_of(size << (23 - F::kMantissa)) * rebias<F>());
  bits = size > F::kTop ? (size == F::kInf ? kInfinity32 : kNaN32) : bits;
  return float_of(bits | sign);
}

}  // namespace dtcomm
