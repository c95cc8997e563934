// One bit an element, and the mean magnitude of its block.
#pragma once

#include "codec/sign.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

struct Sign : Blocks<0> {
  static constexpr bool kHot = false, kOrdered = false, kRotates = true, kPads = true;

  struct Raw {
    std::uint32_t bits;
    float scale;
  };

  DTCOMM_DEVICE bool rotates() const { return codec.rotate != 0; }

  DTCOMM_DEVICE Raw load(const Shape& shape, const std::uint8_t* granule, std::uint32_t at) const {
    if (at >= shape.stored) return {0, 0.0f};
    return {granule[shape.codes_at + at / kOctet], load_field(codec.scale, granule, block_of(at))};
  }

  DTCOMM_DEVICE static void values(std::uint32_t bits, float scale, float (&x)[kOctet]) {
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) x[j] = (bits >> j & 1) != 0 ? -scale : scale;
  }

  DTCOMM_DEVICE void decode(const Raw& raw, float (&x)[kOctet]) const { values(raw.bits, raw.scale, x); }

  // The sum of the block's parts: halves are folded onto halves, the far ones first.
  template <class Lanes>
  DTCOMM_DEVICE float folded(const Lanes& lanes, const float (&x)[kOctet]) const {
    const float one_over = 1.0f / static_cast<float>(codec.block);
    float part[kOctet];
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) part[j] = sign_part(x[j], one_over);
    DTCOMM_LOOP
    for (unsigned reach = group() / 2; reach > 0; reach /= 2) {
      float other[kOctet];
      lanes.swap_octet(part, reach, other);
      DTCOMM_UNROLL
      for (int j = 0; j < kOctet; ++j) part[j] = part[j] + other[j];
    }
    DTCOMM_UNROLL
    for (int half = kOctet / 2; half > 0; half /= 2) {
      DTCOMM_UNROLL
      for (int j = 0; j < half; ++j) part[j] = part[j] + part[j + half];
    }
    return part[0];
  }

  template <bool Feedback, class Lanes>
  DTCOMM_DEVICE void encode(const Lanes& lanes, const Call&, const Shape& shape, const Place& place, int,
                            float (&x)[kOctet], std::uint8_t* granule, float (&decoded)[kOctet]) const {
    // The part of the block that is there: rotated, all of it.
    const std::uint32_t start = place.at & ~(codec.block - 1);
    const std::uint32_t there = shape.n > start ? shape.n - start : 0;
    const bool cut = there < codec.block && !rotates();
    const float share = cut ? static_cast<float>(there) / static_cast<float>(codec.block) : 1.0f;
    const float scale = sign_scale(folded(lanes, x), share, codec.scale);
    std::uint32_t bits = 0;
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) bits |= bits_of(x[j]) >> 31 << j;
    bits = scale > 0.0f ? bits : 0;  // neither a zero block nor a NaN block
    if (place.at < shape.stored) {
      granule[shape.codes_at + place.at / kOctet] = static_cast<std::uint8_t>(bits);
      if (leads(place.at)) store_field(codec.scale, scale, granule, block_of(place.at));
    }
    if constexpr (Feedback) values(bits, scale, decoded);
  }
};

}  // namespace dtcomm::cuda
