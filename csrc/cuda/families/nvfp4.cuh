// nvfp4: 16 elements of e2m1 share a scale of e4m3, and the blocks of a granule an fp32 scale.
#pragma once

#include "codec/nvfp4.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

// The lanes of a granule, a thread block, exchange its largest magnitude.
struct Nvfp4 {
  static constexpr bool kSpecialized = false, kHasMinMax = false, kCanRotate = false, kHasPadding = true;
  static constexpr unsigned kLanesOfBlock = kNvfp4Block / kVec8, kLanesOfGranule = kNvfp4Granule / kVec8;

  struct Raw {
    Codes codes;
    float scale;
  };

  DTCOMM_HD unsigned group() const { return kLanesOfGranule; }
  DTCOMM_DEVICE bool rotates() const { return false; }

  template <bool Whole, class Lanes>
  DTCOMM_DEVICE Raw load(const Lanes&, const GranuleShape& shape, const std::uint8_t* granule, std::uint32_t at) const {
    Raw raw = {};
    if (at >= shape.stored) return raw;
    raw.codes = load_codes(4, shape.stored, at, granule + shape.codes_at);
    const auto own = static_cast<std::uint32_t>(load_bytes<4>(granule + shape.codes_at + shape.stored / 2));
    raw.scale = nvfp4_block_scale(granule[at / kNvfp4Block], float_of(own));
    return raw;
  }

  DTCOMM_DEVICE void decode(const Raw& raw, float (&x)[kVec8]) const {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = minifloat_value<E2m1>(code_at(raw.codes, j)) * raw.scale;
  }

  template <bool Feedback, bool Whole, class Lanes>
  DTCOMM_DEVICE void encode(const Lanes& lanes, const KernelParams&, const GranuleShape& shape, const Vec8Position& pos,
                            int, float (&x)[kVec8], std::uint8_t* granule, float (&decoded)[kVec8]) const {
    const std::uint32_t top = group_max_magnitude(lanes, kLanesOfBlock, x);
    // NaN blocks take no part in the granule's scale.
    const std::uint32_t largest = group_reduce(lanes, kLanesOfGranule, top < kInfinity32 ? top : 0U,
                                               [](std::uint32_t a, std::uint32_t b) { return a > b ? a : b; });
    const float own = nvfp4_granule_scale(largest);
    const std::uint32_t byte = nvfp4_scale_byte(top, own, inverse_of(own));
    const float scale = nvfp4_block_scale(byte, own), inverse = inverse_of(scale);
    std::int32_t code[kVec8];
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      // Elements of zero blocks may have signs, and those of NaN blocks any value.
      code[j] = inverse == 0.0f ? 0 : static_cast<std::int32_t>(nearest_minifloat<E2m1>(x[j] * inverse));
    }
    if (pos.at < shape.stored) {
      store_codes(codes_of(code), 4, shape.stored, pos.at, granule + shape.codes_at);
      if (pos.at % kNvfp4Block == 0) granule[pos.at / kNvfp4Block] = static_cast<std::uint8_t>(byte);
    }
    if (pos.at == 0) store_bytes<4>(bits_of(own), granule + shape.codes_at + shape.stored / 2);
    if constexpr (Feedback) {
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) decoded[j] = minifloat_value<E2m1>(static_cast<std::uint32_t>(code[j])) * scale;
    }
  }
};

}  // namespace dtcomm::cuda
