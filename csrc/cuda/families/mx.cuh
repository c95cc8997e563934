// OCP Microscaling: 32 elements of 8 or 4 bits share a power of two.
#pragma once

#include "codec/mx.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

template <class F>
struct Mx {
  static constexpr bool kHot = false, kOrdered = false, kRotates = true, kPads = true;
  static constexpr unsigned kBits = F::kSign + 1, kLanes = 4, kBlock = kLanes * kOctet;

  bool rotated;

  struct Raw {
    Codes codes;
    float scale;
  };

  DTCOMM_HD unsigned group() const { return kLanes; }
  DTCOMM_DEVICE bool rotates() const { return rotated; }

  DTCOMM_DEVICE Raw load(const Shape& shape, const std::uint8_t* granule, std::uint32_t at) const {
    Raw raw = {};
    if (at >= shape.stored) return raw;
    raw.codes = load_codes(kBits, shape.stored, at, granule + shape.codes_at);
    raw.scale = mx_value(granule[at / kBlock]);
    return raw;
  }

  DTCOMM_DEVICE void decode(const Raw& raw, float (&x)[kOctet]) const {
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) x[j] = minifloat_value<F>(code_at(raw.codes, j)) * raw.scale;
  }

  template <bool Feedback, class Lanes>
  DTCOMM_DEVICE void encode(const Lanes& lanes, const Call&, const Shape& shape, const Place& place, int,
                            float (&x)[kOctet], std::uint8_t* granule, float (&decoded)[kOctet]) const {
    const std::uint32_t scale = mx_scale<F>(top_of_group(lanes, kLanes, x));
    const float inverse = mx_inverse(scale);
    std::int32_t code[kOctet];
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) {
      // Zero blocks may have signs, NaN blocks anything.
      code[j] = inverse == 0.0f ? 0 : static_cast<std::int32_t>(nearest_minifloat<F>(x[j] * inverse));
    }
    if (place.at < shape.stored) {
      store_codes(codes_of(code), kBits, shape.stored, place.at, granule + shape.codes_at);
      if (place.at % kBlock == 0) granule[place.at / kBlock] = static_cast<std::uint8_t>(scale);
    }
    if constexpr (Feedback) {
      DTCOMM_UNROLL
      for (int j = 0; j < kOctet; ++j) {
        decoded[j] = minifloat_value<F>(static_cast<std::uint32_t>(code[j])) * mx_value(scale);
      }
    }
  }
};

}  // namespace dtcomm::cuda
