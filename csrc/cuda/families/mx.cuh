// OCP Microscaling: 32 elements of 8 or 4 bits share a power of two.
#pragma once

#include "codec/mx.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

template <class F>
struct Mx {
  static constexpr bool kSpecialized = false, kHasMinMax = false, kCanRotate = true, kHasPadding = true;
  static constexpr unsigned kBits = F::kSign + 1, kLanes = 4, kBlock = kLanes * kVec8;

  bool rotated;

  struct Raw {
    Codes codes;
    float scale;
  };

  DTCOMM_HD unsigned group() const { return kLanes; }
  DTCOMM_DEVICE bool rotates() const { return rotated; }

  template <bool Whole, class Lanes>
  DTCOMM_DEVICE Raw load(const Lanes&, const GranuleShape& shape, const std::uint8_t* granule, std::uint32_t at) const {
    Raw raw = {};
    if (at >= shape.stored) return raw;
    raw.codes = load_codes(kBits, shape.stored, at, granule + shape.codes_at);
    raw.scale = mx_value(granule[at / kBlock]);
    return raw;
  }

  DTCOMM_DEVICE void decode(const Raw& raw, float (&x)[kVec8]) const {
    minifloat_values<F>(raw.codes, x);
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = x[j] * raw.scale;
  }

  template <bool Feedback, bool Whole, class Lanes>
  DTCOMM_DEVICE void encode(const Lanes& lanes, const KernelParams&, const GranuleShape& shape, const Vec8Position& pos,
                            int, float (&x)[kVec8], std::uint8_t* granule, float (&decoded)[kVec8]) const {
    const std::uint32_t scale = mx_scale<F>(group_max_magnitude(lanes, kLanes, x));
    const float inverse = mx_inverse(scale);
    float t[kVec8];
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) t[j] = x[j] * inverse;
    // Elements of zero blocks may have signs, and those of NaN blocks any value.
    const Codes codes = inverse == 0.0f ? Codes{} : nearest_minifloats<F>(t);
    if (pos.at < shape.stored) {
      store_codes(codes, kBits, shape.stored, pos.at, granule + shape.codes_at);
      if (pos.at % kBlock == 0) granule[pos.at / kBlock] = static_cast<std::uint8_t>(scale);
    }
    if constexpr (Feedback) {
      minifloat_values<F>(codes, decoded);
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) decoded[j] = decoded[j] * mx_value(scale);
    }
  }
};

}  // namespace dtcomm::cuda
