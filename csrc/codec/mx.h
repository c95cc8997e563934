// mx: 32 elements share a power of two, the scale of OCP Microscaling Formats (MX) 1.0: one byte E8M0, 2^(byte - 127).
#pragma once

#include "codec/codec.h"
#include "codec/minifloat.h"

namespace dtcomm {

constexpr std::uint32_t kNaNE8m0 = 255;

// The scale of a block whose largest magnitude has the bits `top`: its power of two becomes that of F's largest number.
// 0 (or less, for a larger type) stands for a zero block.
template <class F>
DTCOMM_HD std::uint32_t mx_scale(std::uint32_t top) {
  constexpr std::uint32_t kExponent = F::kLargestExponent;
  const std::uint32_t exponent = top >> 23;
  const std::uint32_t scale = exponent > kExponent ? exponent - kExponent : 0;
  return top >= kInfinity32 ? kNaNE8m0 : scale;
}

// The factor that turns elements into codes, a power of two: 0 for zero blocks and NaN blocks. mx_scale returns at most
// 252, so the result is a normal number.
DTCOMM_HD float mx_inverse(std::uint32_t scale) {
  return float_of(scale == 0 || scale == kNaNE8m0 ? 0 : (254 - scale) << 23);
}

DTCOMM_HD float mx_value(std::uint32_t scale) {
  const std::uint32_t bits = scale == 0 ? 0x00400000 : scale << 23;  // 2^-127 is subnormal
  return float_of(scale == kNaNE8m0 ? kNaN32 : bits);
}

}  // namespace dtcomm
