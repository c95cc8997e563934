// Sums of magnitudes in the order of folded halves, sign bits of floats, and signs out of bits.
#pragma once

#include "codec/sign.h"
#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"

namespace dtcomm::DTCOMM_ISA {

#if defined(__AVX2__)
// The sum of the parts (codec/sign.h) of a block of the default length, in registers.
inline float folded_parts_of_256(const float* x) {
  constexpr std::size_t kHalf = 128, kRows = kHalf / kLanes;
  const Floats one_over = Floats{} + 1.0f / (2 * kHalf);
  typedef std::uint32_t Words __attribute__((vector_size(kVector)));
  const auto part = [&](std::size_t at) __attribute__((always_inline)) {
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(load(x + at)) & 0x7fffffffU) * one_over;
  };
  Floats sums[kRows / 2];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kRows / 2; ++i) {
    const std::size_t at = i * kLanes, other = at + kHalf / 2;
    sums[i] = (part(at) + part(at + kHalf)) + (part(other) + part(other + kHalf));
  }
#pragma GCC unroll 4
  for (std::size_t half = kRows / 4; half >= 1; half /= 2) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  }
#if defined(__AVX512F__)
  const auto lanes = reinterpret_cast<__m512>(sums[0]);
  const __m256 eight =
      _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, lanes, 0), _mm512_maskz_extractf32x8_ps(0xff, lanes, 1));
#else
  const auto eight = reinterpret_cast<__m256>(sums[0]);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#endif

// The sum of the parts of a block of 16 or more. `room` holds half a block.
inline float folded_parts(const float* x, std::size_t block, float* room) {
#if defined(__AVX2__)
  if (block == 256) return folded_parts_of_256(x);
#endif
  const float one_over = 1.0f / static_cast<float>(block);
  std::size_t half = block / 2;
  for (std::size_t i = 0; i < half; i += 8) {
    for (std::size_t j = i; j < i + 8; ++j) {
      room[j] =
          sign_part(unaligned<float>(x)[j].value, one_over) + sign_part(unaligned<float>(x)[j + half].value, one_over);
    }
  }
  for (half /= 2; half >= 16; half /= 2) {
    for (std::size_t i = 0; i < half; i += 16) {
      for (std::size_t j = i; j < i + 16; ++j) room[j] = room[j] + room[j + half];
    }
  }
  for (; half >= 1; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) room[i] = room[i] + room[i + half];
  }
  return room[0];
}

// Bit i of the string is the sign of x[i]; 8 divides n.
inline void sign_bits(const float* x, std::size_t n, const EncodeArgs& args, std::uint8_t* to) {
  std::size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    if (i % 64 == 0) prefetch_next(args, i);
    const __mmask16 bits = _mm512_movepi32_mask(_mm512_castps_si512(_mm512_loadu_ps(x + i)));
    __builtin_memcpy(to + i / 8, &bits, 2);
  }
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    if (i % 64 == 0) prefetch_next(args, i);
    to[i / 8] = static_cast<std::uint8_t>(_mm256_movemask_ps(_mm256_loadu_ps(x + i)));
  }
#elif defined(DTCOMM_NEON)
  constexpr std::int32_t kPlaces[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  const int32x4_t low = vld1q_s32(kPlaces), high = vld1q_s32(kPlaces + 4);
  const auto signs = [&](std::size_t at) { return vshrq_n_u32(vreinterpretq_u32_f32(load(x + at)), 31); };
  for (; i + 8 <= n; i += 8) {
    if (i % 64 == 0) prefetch_next(args, i);
    const uint32x4_t bits = vorrq_u32(vshlq_u32(signs(i), low), vshlq_u32(signs(i + 4), high));
    to[i / 8] = static_cast<std::uint8_t>(vaddvq_u32(bits));
  }
#endif
  for (; i < n; i += 8) {
    if (i % 64 == 0) prefetch_next(args, i);
    std::uint32_t bits = 0;
    for (std::size_t j = 0; j < 8; ++j) bits |= bits_of(unaligned<float>(x)[i + j].value) >> 31 << j;
    to[i / 8] = static_cast<std::uint8_t>(bits);
  }
}

// Bits as elements of `transform`: 1 or -1.
struct Signs {
  static constexpr std::size_t kBytes = 1;
  static float one(const void* from, std::size_t i) {
    const std::uint32_t bit = static_cast<const std::uint8_t*>(from)[i / 8] >> (i % 8);
    return float_of(bits_of(1.0f) | bit << 31);
  }
#if defined(__AVX512F__)
  static Floats many(const void* from, std::size_t i) {
    __mmask16 bits;
    __builtin_memcpy(&bits, static_cast<const std::uint8_t*>(from) + i / 8, 2);
    return reinterpret_cast<Floats>(_mm512_mask_mov_ps(_mm512_set1_ps(1.0f), bits, _mm512_set1_ps(-1.0f)));
  }
#elif defined(__AVX2__)
  static Floats many(const void* from, std::size_t i) {
    const __m256i byte = _mm256_set1_epi32(static_cast<const std::uint8_t*>(from)[i / 8]);
    const __m256i bit = _mm256_sllv_epi32(byte, _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
    const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(bit), _mm256_set1_ps(-0.0f));
    return reinterpret_cast<Floats>(_mm256_or_ps(sign, _mm256_set1_ps(1.0f)));
  }
#elif defined(DTCOMM_NEON)
  static Floats many(const void* from, std::size_t i) {
    constexpr std::int32_t kUp[4] = {31, 30, 29, 28};
    const uint32x4_t bits =
        vdupq_n_u32(static_cast<std::uint32_t>(static_cast<const std::uint8_t*>(from)[i / 8]) >> (i % 8));
    const uint32x4_t sign = vandq_u32(vshlq_u32(bits, vld1q_s32(kUp)), vdupq_n_u32(0x80000000));
    return vreinterpretq_f32_u32(vorrq_u32(sign, vdupq_n_u32(bits_of(1.0f))));
  }
#endif
};

// A granule's values as operands of `transform`, added to another granule's values.
struct SignRun {
  const std::uint8_t* codes;
  const float* scales;  // of blocks of 1 << shift elements
  int shift;

  float at(float, std::size_t i) const { return Signs::one(codes, i) * scales[i >> shift]; }
#if defined(DTCOMM_VECTORS)
  Floats at(Floats, std::size_t i) const { return Signs::many(codes, i) * scales[i >> shift]; }
#endif
};

}  // namespace dtcomm::DTCOMM_ISA
