// fp16 and bf16: IEEE round to nearest, ties to even; subnormals kept; overflow to Inf; every NaN becomes one.
#pragma once

#include "codec/float_bits.h"

namespace dtcomm {

constexpr std::uint16_t kNaN16 = 0x7e00;
constexpr std::uint16_t kNaNBf16 = 0x7fc0;

DTCOMM_HD std::uint16_t bf16_from_float(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<std::uint16_t>(magnitude(value) > kInfinity32 ? kNaNBf16 : rounded);
}

// The same, rounded away from zero with the probability of the distance from the neighbour nearer to zero; `random` is
// uniform in [0, 1), of which 16 bits count. Only numbers beyond the largest of bf16 can become Inf.
DTCOMM_HD std::uint16_t stochastic_bf16(float value, float random) {
  const std::uint32_t rounded = (bits_of(value) + static_cast<std::uint32_t>(random * 65536.0f)) >> 16;
  return static_cast<std::uint16_t>(magnitude(value) > kInfinity32 ? kNaNBf16 : rounded);
}

DTCOMM_HD float float_from_bf16(std::uint16_t half) { return float_of(static_cast<std::uint32_t>(half) << 16); }

// All cases are computed and selected: a compiler turns this into vectors without branches.
DTCOMM_HD std::uint16_t fp16_from_float(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t size = bits & 0x7fffffff;
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  // Rebias the exponent by 15 - 127 and round at bit 13; a carry walks into the exponent, up to Inf.
  const std::uint32_t normal = (size + 0xc8000fff + ((size >> 13) & 1)) >> 13;
  // Below 2^-14 adding 0.5 leaves the sum's last bit at 2^-24, so the addition itself rounds.
  const std::uint32_t subnormal = bits_of(float_of(size) + 0.5f) - 0x3f000000;
  std::uint32_t half = size < 0x38800000 ? subnormal : normal;
  half = size >= 0x47800000 ? 0x7c00 : half;
  half |= sign;
  return static_cast<std::uint16_t>(size > kInfinity32 ? kNaN16 : half);
}

DTCOMM_HD float float_from_fp16(std::uint16_t half) {
  const std::uint32_t size = half & 0x7fffu;
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t normal = (size << 13) + (112u << 23);
  const std::uint32_t subnormal = bits_of(static_cast<float>(static_cast<std::int32_t>(size)) * 0x1p-24f);
  const std::uint32_t special = ((size << 13) + (224u << 23)) | (size > 0x7c00 ? 0x400000u : 0u);
  std::uint32_t bits = size < 0x400 ? subnormal : normal;
  bits = size >= 0x7c00 ? special : bits;
  return float_of(bits | sign);
}

}  // namespace dtcomm
