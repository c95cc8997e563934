// sign: one bit an element, and the mean magnitude of its block.
#pragma once

#include "codec/codec.h"
#include "codec/float_bits.h"

namespace dtcomm {

// An element's term in its block's mean: the sum of these over a whole block, which is never more than FLT_MAX.
DTCOMM_HD float sign_part(float x, float one_over_block) { return float_of(magnitude(x)) * one_over_block; }

// The scale of a block, `sum` being that of its parts: folded by halves, a[i] += a[i + h] with h = block / 2, ..., 1,
// missing elements being +0. `share` is the part of the block that exists: 1 except for a tensor's last block.
DTCOMM_HD float sign_scale(float sum, float share, Scale type) {
  const std::uint32_t mask = type == Scale::bf16 ? 0xffff0000U : 0xffffffffU;
  std::uint32_t bits = bits_of(sum / share);
  bits += type == Scale::bf16 ? 0x7fff + ((bits >> 16) & 1) : 0;
  const std::uint32_t cap = (kInfinity32 - 1) & mask;
  bits = (bits & mask) > cap ? cap : bits & mask;
  bits = bits < 0x00800000 ? 0 : bits;
  return float_of(finite(sum) ? bits : kNaN32);
}

}  // namespace dtcomm
