// rotate=hadamard: the randomized Hadamard transform of a block, and its inverse. An outlier is spread over its block,
// whose elements become nearly Gaussian for any input (docs/reference/wire-format.md names the sources).
#pragma once

#include "codec/counter_rng.h"
#include "codec/float_bits.h"

namespace dtcomm {

// Chosen among 2^23 seeds so that the signs are far from every row of the Hadamard matrices: a constant block, or one
// of alternating signs, must not be concentrated in one element.
constexpr std::uint32_t kRotationSeed = 8135563;

// The sign bit of element i of every block.
DTCOMM_HD constexpr std::uint32_t rotation_sign(std::uint32_t i) { return mix32(kRotationSeed + i) & 0x80000000U; }

// 1 / sqrt(block), rounded: a power of two, or one times 1 / sqrt(2).
DTCOMM_HD constexpr float rotation_norm(std::uint32_t block) {
  float norm = 1.0f;
  for (; block >= 4; block >>= 2) norm *= 0.5f;
  return block == 2 ? norm * 0x1.6a09e6p-1f : norm;
}

// Signs and norm: applied before the butterflies of the transform, and around those of its inverse. The norm comes
// first in both, so that sums do not overflow.
DTCOMM_HD float rotation_in(float x, std::uint32_t i, float norm) {
  return float_of(bits_of(x) ^ rotation_sign(i)) * norm;
}
DTCOMM_HD float rotation_back(float x, float norm) { return x * norm; }
DTCOMM_HD float rotation_out(float x, std::uint32_t i) { return canonical(float_of(bits_of(x) ^ rotation_sign(i))); }

// The butterflies between, for half = 1, 2, 4, ... block / 2 in this order: (a, b) becomes (a + b, a - b), with a at
// every i whose bit `half` is 0 and b at i + half.
template <class Value>
DTCOMM_HD void butterfly(Value& a, Value& b) {
  const Value difference = a - b;
  a = a + b;
  b = difference;
}

// Rotates a block in place: the rule that vector and warp code must equal bit for bit.
DTCOMM_HD void rotate_block(float* x, std::uint32_t block, bool back) {
  const float norm = rotation_norm(block);
  for (std::uint32_t i = 0; i < block; ++i) x[i] = back ? rotation_back(x[i], norm) : rotation_in(x[i], i, norm);
  for (std::uint32_t half = 1; half < block; half *= 2) {
    for (std::uint32_t i = 0; i < block; ++i) {
      if ((i & half) == 0) butterfly(x[i], x[i + half]);
    }
  }
  for (std::uint32_t i = 0; back && i < block; ++i) x[i] = rotation_out(x[i], i);
}

}  // namespace dtcomm
