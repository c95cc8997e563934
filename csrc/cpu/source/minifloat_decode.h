// Floats of 8 bits into fp32: what float8 and mx have in common. By way of fp16, whose conversion instruction knows
// subnormal numbers. Payloads from elsewhere may hold any byte: granules with Inf or NaN go the long way.
#pragma once

#include "codec/minifloat.h"
#include "cpu/source/cast.h"

namespace dtcomm::DTCOMM_ISA {

// kScale times what `each` makes of a code is its number.
template <class F>
struct Minifloat;

template <>
struct Minifloat<E4m3> {
  static constexpr std::size_t kBytes = 1;
  static constexpr float kScale = 256.0f;
  static float one(const void* from, std::size_t i) {
    return minifloat_value<E4m3>(static_cast<const std::uint8_t*>(from)[i]) * (1.0f / kScale);
  }
  // Shifted by 7 a code is a half with an exponent that is 8 too small; bit 14 is the sign once more.
#if defined(__AVX512F__)
  static Floats many(const void* from, std::size_t i) {
    const auto raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint8_t*>(from) + i));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7),
                                          _mm256_set1_epi16(static_cast<short>(0xbfff)));
    return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, half));
  }
#elif defined(__AVX2__)
  static Floats many(const void* from, std::size_t i) {
    const auto raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const std::uint8_t*>(from) + i));
    const __m128i half =
        _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(raw), 7), _mm_set1_epi16(static_cast<short>(0xbfff)));
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(half));
  }
#endif
};

template <>
struct Minifloat<E5m2> {
  static constexpr std::size_t kBytes = 1;
  static constexpr float kScale = 1.0f;
  static float one(const void* from, std::size_t i) {
    return minifloat_value<E5m2>(static_cast<const std::uint8_t*>(from)[i]);
  }
  // A code is the upper half of a half.
#if defined(__AVX512F__)
  static Floats many(const void* from, std::size_t i) {
    const auto raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint8_t*>(from) + i));
    return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, _mm256_slli_epi16(_mm256_cvtepu8_epi16(raw), 8)));
  }
#elif defined(__AVX2__)
  static Floats many(const void* from, std::size_t i) {
    const auto raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const std::uint8_t*>(from) + i));
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(raw), 8)));
  }
#endif
};

// Codes of 4 bits, the earlier element in the lower half of a byte. All are numbers.
template <>
struct Minifloat<E2m1> {
  static constexpr float kScale = 1.0f;
  static float one(const void* from, std::size_t i) {
    return minifloat_value<E2m1>((static_cast<const std::uint8_t*>(from)[i / 2] >> (i % 2 * 4)) & 15);
  }
#if defined(__AVX512F__)
  static Floats many(const void* from, std::size_t i) {
    const auto raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const std::uint8_t*>(from) + i / 2));
    // The lookup reads the lower 4 bits of an index alone.
    const __m512i index = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_unpacklo_epi8(raw, _mm_srli_epi16(raw, 4)));
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                         -2.0f, -3.0f, -4.0f, -6.0f);
    return reinterpret_cast<Floats>(_mm512_maskz_permutexvar_ps(0xffff, index, values));
  }
#elif defined(__AVX2__)
  static Floats many(const void* from, std::size_t i) {
    std::int32_t four;
    __builtin_memcpy(&four, static_cast<const std::uint8_t*>(from) + i / 2, sizeof four);
    const __m128i raw = _mm_cvtsi32_si128(four);
    const __m256i index = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(raw, _mm_srli_epi16(raw, 4)));
    // The lookup reads the lower 3 bits of an index alone.
    const __m256 values = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(index, 28)), _mm256_set1_ps(-0.0f));
    return reinterpret_cast<Floats>(_mm256_or_ps(_mm256_permutevar8x32_ps(values, index), sign));
  }
#endif
};

// Are all of these codes numbers?
template <class F>
inline bool all_numbers(const std::uint8_t* codes, std::size_t n) {
  if constexpr (F::kSign == 3) return true;
  std::size_t i = 0;
  std::uint8_t top = 0;
#if defined(__AVX2__)
  __m256i tops = _mm256_setzero_si256();
  const __m256i signs = _mm256_set1_epi8(static_cast<char>(0x80));
  for (; i + 32 <= n; i += 32) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    tops = _mm256_max_epu8(tops, _mm256_or_si256(raw, signs));
  }
  const __m256i above = _mm256_subs_epu8(tops, _mm256_set1_epi8(static_cast<char>(0x80 | F::kTop)));
  if (!_mm256_testz_si256(above, above)) return false;
#endif
  for (; i < n; ++i) {
    const std::uint8_t size = codes[i] & 0x7f;
    top = size > top ? size : top;
  }
  return top <= F::kTop;
}

// to[i] = finish(value of element i, i) for i < n. Block is the block's length where compilers know it, else 0.
template <class F, std::size_t Block, bool Stream, class Finish>
inline __attribute__((always_inline)) void each_minifloat(const std::uint8_t* codes, const float* scales,
                                                          std::size_t length, std::size_t n, float* to,
                                                          const Finish& finish) {
  const std::size_t block = Block ? Block : length;
  const bool numbers = all_numbers<F>(codes, n);
  const auto decode_block = [&](std::size_t at, std::size_t count, float scale) __attribute__((always_inline)) {
    const float by = scale * Minifloat<F>::kScale;
    // The scale may be too large for that, or Inf, or a NaN that is not the canonical one.
    if (F::kSign == 3 || (numbers && (finite(by) || bits_of(scale) == kNaN32))) {
      each<Minifloat<F>, Stream>(codes + (F::kSign == 3 ? at / 2 : at), count, to + at,
                                 [&](auto q, std::size_t i) { return finish(q * by, at + i); });
    } else {
      auto* out = cells<float>(to);
#pragma GCC ivdep
      for (std::size_t i = at; i < at + count; ++i) {
        out[i].value = finish(canonical(minifloat_value<F>(codes[i]) * scale), i);
      }
    }
  };
  std::size_t at = 0;
  for (; at + block <= n; at += block) decode_block(at, block, *scales++);
  if (at < n) decode_block(at, n - at, *scales);
}

}  // namespace dtcomm::DTCOMM_ISA
