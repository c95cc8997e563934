// What the families with a scale for each block have in common.
#pragma once

#include "codec/integer.h"
#include "cuda/code_packing.cuh"
#include "cuda/params.cuh"

namespace dtcomm::cuda {

DTCOMM_DEVICE void store_field(Scale type, float value, std::uint8_t* to, std::uint32_t block) {
  if (type == Scale::fp32) {
    reinterpret_cast<Word32*>(to)[block] = bits_of(value);
  } else {
    reinterpret_cast<Word16*>(to)[block] = static_cast<std::uint16_t>(bits_of(value) >> 16);
  }
}

// A load that depends on the type, but no branch, which would make loads wait for each other.
DTCOMM_DEVICE float load_field(Scale type, const std::uint8_t* from, std::uint32_t block) {
  const bool wide = type == Scale::fp32;
  const auto* high = reinterpret_cast<const Word16*>(from) + (wide ? 2 * block + 1 : block);
  const std::uint32_t low = wide ? high[-1] : 0;
  return float_of(static_cast<std::uint32_t>(*high) << 16 | low);
}

// The bits of a group's largest magnitude; NaN is above Inf, which is above every number.
template <class Lanes>
DTCOMM_DEVICE std::uint32_t group_max_magnitude(const Lanes& lanes, unsigned group, const float (&x)[kVec8]) {
  std::uint32_t top = magnitude(x[0]);
  DTCOMM_UNROLL
  for (int j = 1; j < kVec8; ++j) {
    const std::uint32_t size = magnitude(x[j]);
    top = size > top ? size : top;
  }
  return group_reduce(lanes, group, top, [](std::uint32_t a, std::uint32_t b) { return a > b ? a : b; });
}

// The blocks of a family. Group, the lanes of a block, is 0 where the compiler does not know it.
template <unsigned Group>
struct Blocks {
  IntegerRules rules;
  Codec codec;
  unsigned block_shift;

  DTCOMM_HD unsigned group() const { return Group ? Group : codec.block / kVec8; }
  DTCOMM_DEVICE std::uint32_t block_of(std::uint32_t at) const {
    return Group ? at / (Group * kVec8) : at >> block_shift;
  }
  DTCOMM_DEVICE unsigned block_elements() const { return group() * kVec8; }
  DTCOMM_DEVICE bool leads(std::uint32_t at) const { return at % block_elements() == 0; }
};

}  // namespace dtcomm::cuda
