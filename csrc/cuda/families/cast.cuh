// Casts: an element of the payload is an element of the tensor in the wire's type.
#pragma once

#include "cuda/params.cuh"
#include "cuda/vec8.cuh"

namespace dtcomm::cuda {

template <DType Wire>
struct Cast {
  static constexpr bool kOrdered = true, kRotates = false, kPads = false;
  static constexpr bool kHot = true;
  static constexpr int kQuads = Wire == DType::f32 ? 2 : 1;
  static constexpr unsigned kPerQuad = kOctet / kQuads;

  struct Raw {
    Quad quad[kQuads];
  };

  DTCOMM_DEVICE bool rotates() const { return false; }
  DTCOMM_HD unsigned group() const { return 1; }

  // Granules are padded to sixteen bytes, so what exists of an octet can be read by quads.
  DTCOMM_DEVICE Raw load(const Shape& shape, const std::uint8_t* granule, std::uint32_t at) const {
    Raw raw = {};
    DTCOMM_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const std::uint32_t element = at + q * kPerQuad;
      if (element < shape.n) raw.quad[q] = load_quad(granule + element * size_of(Wire));
    }
    return raw;
  }

  DTCOMM_DEVICE void decode(const Raw& raw, float (&x)[kOctet]) const {
    if constexpr (Wire == DType::f32) {
      DTCOMM_UNROLL
      for (int j = 0; j < kOctet; ++j) x[j] = float_of(raw.quad[j / 4].word[j % 4]);
    } else {
      floats_from_halves(Wire, raw.quad[0], x);
    }
  }

  template <bool Feedback, class Lanes>
  DTCOMM_DEVICE void encode(const Lanes&, const Call&, const Shape& shape, const Place& place, int, float (&x)[kOctet],
                            std::uint8_t* granule, float (&decoded)[kOctet]) const {
    Raw raw;
    if constexpr (Wire == DType::f32) {
      DTCOMM_UNROLL
      for (int j = 0; j < kOctet; ++j) raw.quad[j / 4].word[j % 4] = bits_of(canonical(x[j]));
    } else {
      raw.quad[0] = halves_from_floats(Wire, x);
    }
    DTCOMM_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const std::uint32_t element = place.at + q * kPerQuad;
      if (element < shape.n) store_quad(raw.quad[q], granule + element * size_of(Wire));
    }
    if constexpr (Feedback) decode(raw, decoded);
  }
};

}  // namespace dtcomm::cuda
