// What the families with a scale for each block have in common.
#pragma once

#include <cmath>

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
#if defined(__CUDA_ARCH__)
  const auto join = [](float a, float b) {  // one instruction, and the absolute values are part of it
    float top;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(top) : "f"(a), "f"(b));
    return top;
  };
  float top = fabsf(x[0]);
  DTCOMM_UNROLL
  for (int j = 1; j < kVec8; ++j) top = join(top, fabsf(x[j]));
  return bits_of(group_reduce(lanes, group, top, join));
#else
  std::uint32_t top = magnitude(x[0]);
  for (int j = 1; j < kVec8; ++j) {
    const std::uint32_t size = magnitude(x[j]);
    top = size > top ? size : top;
  }
  return group_reduce(lanes, group, top, [](std::uint32_t a, std::uint32_t b) { return a > b ? a : b; });
#endif
}

// x / levels for the largest codes of int8 and int4 and every x >= 0 that is finite: csrc/tests/division.cpp tries all.
DTCOMM_DEVICE float divide_exactly(float x, float levels) {
  const float reciprocal = 1.0f / levels, q = x * reciprocal;
  return fmaf(fmaf(-levels, q, x), reciprocal, q);
}

// 1 / scale for a normal bf16, from an estimate that is at most one unit in the last place away: a step of Newton's
// method, which csrc/tests/division.cpp tries from each such estimate.
DTCOMM_DEVICE float refined_inverse(float scale, float estimate) {
  return fmaf(estimate, fmaf(-scale, estimate, 1.0f), estimate);
}

DTCOMM_DEVICE float inverse_of_bf16(float scale) {
#if defined(__CUDA_ARCH__)
  float estimate;  // PTX: at most one unit in the last place away
  asm("rcp.approx.f32 %0, %1;" : "=f"(estimate) : "f"(scale));
  return refined_inverse(scale, estimate);
#else
  return 1.0f / scale;
#endif
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
