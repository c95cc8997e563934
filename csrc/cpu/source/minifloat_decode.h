// Floats of 8 bits into fp32: what float8 and mx have in common. Normal numbers by a shift and their scale; vectors
// with subnormal ones by way of fp16, whose conversion instruction knows them. Payloads from elsewhere may hold any
// byte: vectors with Inf or NaN go the long way.
#pragma once

#include "codec/minifloat.h"
#include "cpu/source/blocks.h"
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

// A granule's numbers as `each` wants its operands, one or many at an index: a term beside that of another granule.
template <class F>
class MinifloatRun {
 public:
  // `scales` become what the codes are multiplied by.
  MinifloatRun(const std::uint8_t* codes, std::size_t n, float* scales, std::size_t blocks, std::size_t block)
      : codes_(codes), by_(scales), shift_(__builtin_ctzll(block)), usable_(all_numbers<F>(codes, n)) {
    for (std::size_t b = 0; b < blocks; ++b) {
      const float by = scales[b] * Minifloat<F>::kScale;
      usable_ = usable_ && (finite(by) || !finite(scales[b]));
      scales[b] = by;
    }
  }

  // False where these are not the numbers: codes are no numbers, or a scale is too large.
  bool usable() const { return usable_; }

  float at(float, std::size_t i) const { return Minifloat<F>::one(codes_, i) * by_[i >> shift_]; }
#if defined(__AVX2__)
  Floats at(Floats, std::size_t i) const { return Minifloat<F>::many(codes_, i) * by_[i >> shift_]; }
#endif

 private:
  const std::uint8_t* codes_;
  const float* by_;
  int shift_;
  bool usable_;
};

#if defined(__AVX2__)
// Numbers of 8 bits by a shift alone, in units of 1 / rebias. Not for subnormal ones, on which some processors'
// products take a hundred times as long.
template <class F>
inline __attribute__((always_inline)) Floats shifted(const std::uint8_t* codes) {
  constexpr int kUp = 23 - F::kMantissa, kKept = static_cast<int>(0x80000000U | 0x7fU << kUp);
  // Widened with their signs, which are therefore where they belong.
#if defined(__AVX512F__)
  const auto raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m512i up = _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, raw), kUp);
  return reinterpret_cast<Floats>(_mm512_and_si512(up, _mm512_set1_epi32(kKept)));
#else
  const auto raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  return reinterpret_cast<Floats>(
      _mm256_and_si256(_mm256_slli_epi32(_mm256_cvtepi8_epi32(raw), kUp), _mm256_set1_epi32(kKept)));
#endif
}

constexpr std::size_t kCodes = 4 * kLanes;  // of 8 bits, in a vector

// Are these all normal numbers?
template <class F>
inline __attribute__((always_inline)) bool all_normal(const std::uint8_t* codes) {
  // Twice the code is twice its size.
  constexpr int kLeast = 2 << F::kMantissa, kRange = static_cast<int>(2 * F::kTop) - kLeast;
#if defined(__AVX512F__)
  const __m512i raw = _mm512_loadu_si512(codes);
  const __m512i above = _mm512_sub_epi8(_mm512_add_epi8(raw, raw), _mm512_set1_epi8(static_cast<char>(kLeast)));
  return _mm512_cmpgt_epu8_mask(above, _mm512_set1_epi8(static_cast<char>(kRange))) == 0;
#else
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const __m256i above = _mm256_sub_epi8(_mm256_add_epi8(raw, raw), _mm256_set1_epi8(static_cast<char>(kLeast)));
  const __m256i excess = _mm256_subs_epu8(above, _mm256_set1_epi8(static_cast<char>(kRange)));
  return _mm256_testz_si256(excess, excess) != 0;
#endif
}
#endif

// to[i] = finish(value of element i, i) for i < n. Block is the block's length where compilers know it, else 0.
template <class F, std::size_t Block, bool Stream, class Finish>
inline __attribute__((always_inline)) void each_minifloat(const std::uint8_t* codes, const float* scales,
                                                          std::size_t length, std::size_t n, float* to,
                                                          const Finish& finish) {
  const std::size_t block = Block ? Block : length;
  const int shift = __builtin_ctzll(block);
  // Elements at .. at + count - 1, of one block.
  const auto decode_run = [&](std::size_t at, std::size_t count) __attribute__((always_inline)) {
    const float scale = scales[at >> shift], by = scale * Minifloat<F>::kScale;
    // The scale may be too large for that, or Inf, or a NaN that is not the canonical one.
    if (F::kSign == 3 || ((finite(by) || bits_of(scale) == kNaN32) && all_numbers<F>(codes + at, count))) {
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
#if defined(__AVX2__)
  if constexpr (F::kSign == 7) {
    float by[kMostBlocks];
    const std::size_t blocks = n >> shift;
    bool usual = true;
#pragma GCC unroll 1
    for (std::size_t b = 0; b < blocks; ++b) {
      by[b] = scales[b] * rebias<F>();
      usual = usual && (finite(by[b]) || bits_of(scales[b]) == kNaN32);
    }
    const std::size_t whole = usual ? (blocks << shift) & ~(kCodes - 1) : 0;
    for (; at < whole; at += kCodes) {
      if (__builtin_expect(all_normal<F>(codes + at), 1)) {
#pragma GCC unroll 4
        for (std::size_t i = at; i < at + kCodes; i += kLanes) {
          store<Stream>(to + i, finish(shifted<F>(codes + i) * by[i >> shift], i));
        }
      } else {
        const std::size_t run = smaller(block, kCodes);
        for (std::size_t i = at; i < at + kCodes; i += run) decode_run(i, run);
      }
    }
  }
#endif
  while (at < n) {
    const std::size_t count = smaller(block - (at & (block - 1)), n - at);
    decode_run(at, count);
    at += count;
  }
}

}  // namespace dtcomm::DTCOMM_ISA
