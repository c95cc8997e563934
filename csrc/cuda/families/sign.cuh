// One bit for each element, and the mean magnitude of its block.
#pragma once

#include "codec/sign.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

struct Sign : Blocks<0> {
  static constexpr bool kSpecialized = false, kHasMinMax = false, kCanRotate = true, kHasPadding = true;

  struct Raw {
    std::uint32_t bits;
    float scale;
  };

  DTCOMM_DEVICE bool rotates() const { return codec.rotate != 0; }

  template <bool Whole, class Lanes>
  DTCOMM_DEVICE Raw load(const Lanes&, const GranuleShape& shape, const std::uint8_t* granule, std::uint32_t at) const {
    if (at >= shape.stored) return {0, 0.0f};
    return {granule[shape.codes_at + at / kVec8], load_field(codec.scale, granule, block_of(at))};
  }

  DTCOMM_DEVICE static void values(std::uint32_t bits, float scale, float (&x)[kVec8]) {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = (bits >> j & 1) != 0 ? -scale : scale;
  }

  DTCOMM_DEVICE void decode(const Raw& raw, float (&x)[kVec8]) const { values(raw.bits, raw.scale, x); }

  // The sum over the block: halves are folded onto halves, the far ones first.
  template <class Lanes>
  DTCOMM_DEVICE float folded(const Lanes& lanes, const float (&x)[kVec8]) const {
    const float one_over = 1.0f / static_cast<float>(codec.block);
    float part[kVec8];
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) part[j] = sign_part(x[j], one_over);
    DTCOMM_LOOP
    for (unsigned reach = group() / 2; reach > 0; reach /= 2) {
      float other[kVec8];
      lanes.shuffle_xor_vec8(part, reach, other);
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) part[j] = part[j] + other[j];
    }
    DTCOMM_UNROLL
    for (int half = kVec8 / 2; half > 0; half /= 2) {
      DTCOMM_UNROLL
      for (int j = 0; j < half; ++j) part[j] = part[j] + part[j + half];
    }
    return part[0];
  }

  template <bool Feedback, bool Whole, class Lanes>
  DTCOMM_DEVICE void encode(const Lanes& lanes, const KernelParams&, const GranuleShape& shape, const Vec8Position& pos,
                            int, float (&x)[kVec8], std::uint8_t* granule, float (&decoded)[kVec8]) const {
    // The part of the block that exists; all of it where it is rotated.
    const std::uint32_t start = pos.at & ~(codec.block - 1);
    const std::uint32_t present = shape.n > start ? shape.n - start : 0;
    const bool cut = present < codec.block && !rotates();
    const float share = cut ? static_cast<float>(present) / static_cast<float>(codec.block) : 1.0f;
    const float scale = sign_scale(folded(lanes, x), share, codec.scale);
    std::uint32_t bits = 0;
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) bits |= bits_of(x[j]) >> 31 << j;
    bits = scale > 0.0f ? bits : 0;  // neither a zero block nor a NaN block
    if (pos.at < shape.stored) {
      granule[shape.codes_at + pos.at / kVec8] = static_cast<std::uint8_t>(bits);
      if (leads(pos.at)) store_field(codec.scale, scale, granule, block_of(pos.at));
    }
    if constexpr (Feedback) values(bits, scale, decoded);
  }
};

}  // namespace dtcomm::cuda
