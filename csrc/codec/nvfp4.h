// nvfp4: 16 elements of e2m1 share a scale of e4m3, and the blocks of a granule an fp32 scale.
#pragma once

#include "codec/codec.h"
#include "codec/integer.h"
#include "codec/minifloat.h"

namespace dtcomm {

constexpr std::uint32_t kNaNE4m3 = 0x7f;
constexpr float kLargestOfNvfp4 = E2m1::kLargest * E4m3::kLargest;
// The largest granule scale g for which 6 * (448 * g) is finite.
constexpr std::uint32_t kLargestNvfp4Scale = 0x79c30c30;

// The scale of a granule in whose finite blocks the largest magnitude has the bits `top`: with it the block that has
// that element gets the largest scale of e4m3.
DTCOMM_HD float nvfp4_granule_scale(std::uint32_t top) {
  std::uint32_t bits = bits_of(float_of(top) / kLargestOfNvfp4);
  bits = bits > kLargestNvfp4Scale ? kLargestNvfp4Scale : bits;
  return float_of(bits < 0x00800000 ? 0 : bits);
}

// The scale of a block from its stored byte. A block whose scale is Inf or NaN decodes to NaN.
DTCOMM_HD float nvfp4_block_scale(std::uint32_t byte, float granule) {
  const float scale = minifloat_value<E4m3>(byte) * granule;
  return float_of(finite(scale) ? bits_of(scale) : kNaN32);
}

// The stored byte of a block whose largest magnitude has the bits `top`; `inverse` is inverse_of(granule).
DTCOMM_HD std::uint32_t nvfp4_scale_byte(std::uint32_t top, float granule, float inverse) {
  const std::uint32_t nearest = nearest_minifloat<E4m3>(float_of(top) * inverse * (1.0f / E2m1::kLargest));
  const std::uint32_t usable = bits_of(minifloat_value<E4m3>(nearest) * granule) < 0x00800000 ? 0 : nearest;
  return top >= kInfinity32 ? kNaNE4m3 : usable;
}

}  // namespace dtcomm
