// Casts: an element of the payload is an element of the tensor in the wire's type.
#pragma once

#include "cuda/params.cuh"
#include "cuda/vec8.cuh"

namespace dtcomm::cuda {

template <DType Wire>
struct Cast {
  static constexpr bool kHasMinMax = true, kCanRotate = false, kHasPadding = false;
  static constexpr bool kSpecialized = true;
  static constexpr int kQuads = Wire == DType::f32 ? 2 : 1;
  static constexpr unsigned kPerQuad = kVec8 / kQuads;

  bool stochastic = false;  // only to bf16

  struct Raw {
    Quad quad[kQuads];
  };

  DTCOMM_DEVICE bool rotates() const { return false; }
  DTCOMM_HD unsigned group() const { return 1; }

  // Granules are padded to sixteen bytes, so the elements of a vec8 that exist can be loaded by quads.
  template <bool Whole, class Lanes>
  DTCOMM_DEVICE Raw load(const Lanes&, const GranuleShape& shape, const std::uint8_t* granule, std::uint32_t at) const {
    Raw raw = {};
    DTCOMM_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const std::uint32_t element = at + q * kPerQuad;
      if (Whole || element < shape.n) raw.quad[q] = load_quad(granule + element * size_of(Wire));
    }
    return raw;
  }

  DTCOMM_DEVICE void decode(const Raw& raw, float (&x)[kVec8]) const {
    if constexpr (Wire == DType::f32) {
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) x[j] = float_of(raw.quad[j / 4].word[j % 4]);
    } else {
      floats_from_halves(Wire, raw.quad[0], x);
    }
  }

  template <bool Feedback, bool Whole, class Lanes>
  DTCOMM_DEVICE void encode(const Lanes&, const KernelParams& params, const GranuleShape& shape,
                            const Vec8Position& pos, int, float (&x)[kVec8], std::uint8_t* granule,
                            float (&decoded)[kVec8]) const {
    Raw raw;
    if constexpr (Wire == DType::f32) {
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) raw.quad[j / 4].word[j % 4] = bits_of(canonical(x[j]));
    } else if (Wire == DType::bf16 && stochastic) {
      float random[kVec8];
      uniform_vec8(params.key, params.offset + pos.first, random);
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; j += 2) {
        const std::uint32_t high = stochastic_bf16(x[j + 1], random[j + 1]);
        raw.quad[0].word[j / 2] = stochastic_bf16(x[j], random[j]) | high << 16;
      }
    } else {
      raw.quad[0] = halves_from_floats(Wire, x);
    }
    DTCOMM_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const std::uint32_t element = pos.at + q * kPerQuad;
      if (Whole || element < shape.n) store_quad(raw.quad[q], granule + element * size_of(Wire));
    }
    if constexpr (Feedback) decode(raw, decoded);
  }
};

}  // namespace dtcomm::cuda
