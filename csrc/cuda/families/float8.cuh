// e4m3, e5m2 and e3m4 with a scale for each block.
#pragma once

#include <type_traits>

#include "codec/float8.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

// Group is 0 where the compiler does not know it. Plain: rounded to nearest.
template <class F, unsigned Group, bool Plain>
struct Float8 : Blocks<Group> {
  static constexpr bool kSpecialized = Plain, kHasMinMax = false, kCanRotate = false, kHasPadding = true;
  using Blocks<Group>::codec;
  using Blocks<Group>::rules;
  using Blocks<Group>::group;
  using Blocks<Group>::block_of;

  struct Raw {
    Codes codes;
    float scale;
  };

  DTCOMM_DEVICE bool rotates() const { return false; }

  template <bool Whole, class Lanes>
  DTCOMM_DEVICE Raw load(const Lanes&, const GranuleShape& shape, const std::uint8_t* granule, std::uint32_t at) const {
    Raw raw = {};
    if (!Whole && at >= shape.stored) return raw;
    raw.codes = load_codes<Whole>(8, shape.stored, at, granule + shape.codes_at);
    raw.scale = load_field(codec.scale, granule, block_of(at));
    return raw;
  }

  DTCOMM_DEVICE void decode(const Raw& raw, float (&x)[kVec8]) const {
    minifloat_values<F>(raw.codes, x);
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = x[j] * raw.scale;
  }

  template <bool Feedback, bool Whole, class Lanes>
  DTCOMM_DEVICE void encode(const Lanes& lanes, const KernelParams& params, const GranuleShape& shape,
                            const Vec8Position& pos, int, float (&x)[kVec8], std::uint8_t* granule,
                            float (&decoded)[kVec8]) const {
    const float scale = scale_of(rules, group_max_magnitude(lanes, group(), x)), inverse = inverse_of(scale);
    float t[kVec8];
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) t[j] = x[j] * inverse;
    Codes codes;
    if (!Plain && codec.stochastic) {
      float random[kVec8];
      uniform_vec8(params.key, params.offset + pos.first, random);
      std::int32_t code[kVec8];
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) code[j] = static_cast<std::int32_t>(stochastic_minifloat<F>(t[j], random[j]));
      codes = codes_of(code);
    } else {
      codes = nearest_minifloats<F>(t);
    }
    // Elements of zero blocks may have signs, and those of NaN blocks any value.
    if (inverse == 0.0f) codes = {};
    if (Whole || pos.at < shape.stored) {
      store_codes<Whole>(codes, 8, shape.stored, pos.at, granule + shape.codes_at);
      if (this->leads(pos.at)) store_field(codec.scale, scale, granule, block_of(pos.at));
    }
    if constexpr (Feedback) {
      minifloat_values<F>(codes, decoded);
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) decoded[j] = decoded[j] * scale;
    }
  }
};

}  // namespace dtcomm::cuda
