// Decodes small floats to fp32, for float8 and mx. Normal numbers take a shift and their scale. Vectors with subnormal
// numbers are converted through fp16, whose conversion instruction handles them. Payloads from elsewhere may hold any
// byte: vectors with Inf or NaN take the slow path.
#pragma once

#include "codec/minifloat.h"
#include "cpu/source/blocks.h"
#include "cpu/source/cast.h"
#include "cpu/source/loops.h"

namespace dtcomm::DTCOMM_ISA {

#if defined(DTCOMM_NEON)
// Four bytes from element i on, in the lower half.
inline __attribute__((always_inline)) uint8x8_t load_four(const void* from, std::size_t i) {
  std::uint32_t four;
  __builtin_memcpy(&four, static_cast<const std::uint8_t*>(from) + i, sizeof four);
  return vcreate_u8(four);
}
#endif

// The value of a code is kScale times what `one` and `many` return.
template <class F>
struct Minifloat;

// e4m3 and e3m4, a code of 8 bits as a half: its sign, and its exponent and mantissa right below the sign's copies.
template <class F>
struct MinifloatByHalf {
  static constexpr std::size_t kBytes = 1;
  static constexpr int kUp = 10 - F::kMantissa;  // the bits by which a half's mantissa is longer
  static constexpr auto kKept = static_cast<short>(0x8000 | 0x7f << kUp);
  // What the half's exponent is too small by: the difference of the biases.
  static constexpr float kScale = F::kMantissa == 3 ? 256.0f : 4096.0f;
  static float one(const void* from, std::size_t i) {
    return minifloat_value<F>(static_cast<const std::uint8_t*>(from)[i]) * (1.0f / kScale);
  }
#if defined(__AVX512F__)
  static Floats many(const void* from, std::size_t i) {
    const auto raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint8_t*>(from) + i));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), kUp), _mm256_set1_epi16(kKept));
    return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, half));
  }
#elif defined(__AVX2__)
  static Floats many(const void* from, std::size_t i) {
    const auto raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const std::uint8_t*>(from) + i));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(raw), kUp), _mm_set1_epi16(kKept));
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(half));
  }
#elif defined(DTCOMM_NEON)
  static Floats many(const void* from, std::size_t i) {
    const int16x4_t wide = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four(from, i))));
    const int16x4_t half = vand_s16(vshl_n_s16(wide, kUp), vdup_n_s16(kKept));
    return vcvt_f32_f16(vreinterpret_f16_s16(half));
  }
#endif
};

template <>
struct Minifloat<E4m3> : MinifloatByHalf<E4m3> {};

template <>
struct Minifloat<E3m4> : MinifloatByHalf<E3m4> {};

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
#elif defined(DTCOMM_NEON)
  static Floats many(const void* from, std::size_t i) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(vshll_n_u8(load_four(from, i), 8))));
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
#elif defined(DTCOMM_NEON)
  static Floats many(const void* from, std::size_t i) {
    std::uint16_t two;
    __builtin_memcpy(&two, static_cast<const std::uint8_t*>(from) + i / 2, sizeof two);
    const uint8x8_t raw = vcreate_u8(two);
    const uint8x8_t index = vand_u8(vzip1_u8(raw, vshr_n_u8(raw, 4)), vdup_n_u8(0x0f));
    // The two bytes of each value as bf16.
    constexpr std::uint8_t kUpper[16] = {0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                         0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    constexpr std::uint8_t kLower[16] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0,
                                         0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0};
    const uint8x8_t upper = vqtbl1_u8(vld1q_u8(kUpper), index), lower = vqtbl1_u8(vld1q_u8(kLower), index);
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vzip1_u8(lower, upper)), 16));
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

#if defined(DTCOMM_VECTORS)
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
#elif defined(DTCOMM_NEON)
  const int32x4_t wide = vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four(codes, 0)))));
  return vreinterpretq_f32_s32(vandq_s32(vshlq_n_s32(wide, kUp), vdupq_n_s32(kKept)));
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
#elif defined(DTCOMM_NEON)
  const uint8x16_t raw = vld1q_u8(codes);
  return vmaxvq_u8(vsubq_u8(vaddq_u8(raw, raw), vdupq_n_u8(kLeast))) <= kRange;
#else
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const __m256i above = _mm256_sub_epi8(_mm256_add_epi8(raw, raw), _mm256_set1_epi8(static_cast<char>(kLeast)));
  const __m256i excess = _mm256_subs_epu8(above, _mm256_set1_epi8(static_cast<char>(kRange)));
  return _mm256_testz_si256(excess, excess) != 0;
#endif
}
#endif

// to = the sum of two granules' numbers. False where a scale is so large that the general way is needed: nothing was
// done. The loops over blocks are a good part of the work: they stay simple.
template <class F, bool Stream>
inline bool add_minifloats(const std::uint8_t* const (&codes)[2], const float (&scales)[2][kMostBlocks],
                           std::size_t blocks, std::size_t block, std::size_t n, float* to) {
  const int shift = __builtin_ctzll(block);
  [[maybe_unused]] float up[2][kMostBlocks];
  std::uint32_t worst = 0;
  for (int j = 0; j < 2; ++j) {
#pragma GCC unroll 1
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::uint32_t size = magnitude(scales[j][b]);
      worst = size > worst ? size : worst;
      up[j][b] = scales[j][b] * (F::kSign == 7 ? rebias<F>() : 1.0f);
    }
  }
  // From here on no number is Inf, and no sum of numbers NaN.
  if (!finite(float_of(worst) * rebias<F>())) return false;
  std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
  const auto half = [&](int j, std::size_t at) __attribute__((always_inline)) {
    return Minifloat<F>::many(codes[j] + (F::kSign == 3 ? at / 2 : at), 0) *
           (scales[j][at >> shift] * Minifloat<F>::kScale);
  };
  for (; i + kCodes <= n; i += kCodes) {
    if constexpr (F::kSign == 7) {
      if (__builtin_expect(all_normal<F>(codes[0] + i) && all_normal<F>(codes[1] + i), 1)) {
#pragma GCC unroll 4
        for (std::size_t at = i; at < i + kCodes; at += kLanes) {
          const std::size_t b = at >> shift;
          store<Stream>(to + at, shifted<F>(codes[0] + at) * up[0][b] + shifted<F>(codes[1] + at) * up[1][b]);
        }
        continue;
      }
      if (!all_numbers<F>(codes[0] + i, kCodes) || !all_numbers<F>(codes[1] + i, kCodes)) {
        for (std::size_t at = i; at < i + kCodes; at += kLanes) {
          Floats sum;
          for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const std::size_t k = at + lane;
            sum[lane] = canonical(minifloat_value<F>(codes[0][k]) * scales[0][k >> shift] +
                                  minifloat_value<F>(codes[1][k]) * scales[1][k >> shift]);
          }
          store<Stream>(to + at, sum);
        }
        continue;
      }
    }
#pragma GCC unroll 4
    for (std::size_t at = i; at < i + kCodes; at += kLanes) store<Stream>(to + at, half(0, at) + half(1, at));
  }
#endif
  auto* out = unaligned<float>(to);
  for (; i < n; ++i) {
    const float a = Minifloat<F>::one(codes[0], i) * Minifloat<F>::kScale * scales[0][i >> shift];
    out[i].value = canonical(a + Minifloat<F>::one(codes[1], i) * Minifloat<F>::kScale * scales[1][i >> shift]);
  }
  return true;
}

// to[i] = finish(value of element i, i) for i < n. Block is the block length, or 0 if it is known at run time only.
template <class F, std::size_t Block, bool Stream, class Finish>
inline __attribute__((always_inline)) void for_each_minifloat(const std::uint8_t* codes, const float* scales,
                                                              std::size_t length, std::size_t n, float* to,
                                                              const Finish& finish) {
  const std::size_t block = Block ? Block : length;
  const int shift = __builtin_ctzll(block);
  // Elements at .. at + count - 1, of one block.
  const auto decode_run = [&](std::size_t at, std::size_t count) __attribute__((always_inline)) {
    const float scale = scales[at >> shift], by = scale * Minifloat<F>::kScale;
    // The scale may be too large for that, or Inf, or a NaN that is not the canonical one.
    if (F::kSign == 3 || ((finite(by) || bits_of(scale) == kNaN32) && all_numbers<F>(codes + at, count))) {
      transform<Minifloat<F>, Stream>(codes + (F::kSign == 3 ? at / 2 : at), count, to + at,
                                      [&](auto q, std::size_t i) { return finish(q * by, at + i); });
    } else {
      auto* out = unaligned<float>(to);
      DTCOMM_INDEPENDENT
      for (std::size_t i = at; i < at + count; ++i) {
        out[i].value = finish(canonical(minifloat_value<F>(codes[i]) * scale), i);
      }
    }
  };
  std::size_t at = 0;
#if defined(DTCOMM_VECTORS)
  if constexpr (F::kSign == 7) {
    float by[kMostBlocks];
    const std::size_t blocks = n >> shift;
    bool usual = true;
    if constexpr (Block == 32) {  // without branches, which compilers vectorize: that pays for many blocks
      std::uint32_t unusual = 0;
      for (std::size_t b = 0; b < blocks; ++b) {
        by[b] = scales[b] * rebias<F>();
        unusual |= magnitude(by[b]) >= kInfinity32 && bits_of(scales[b]) != kNaN32 ? 1 : 0;
      }
      usual = unusual == 0;
    } else {
#pragma GCC unroll 1
      for (std::size_t b = 0; b < blocks; ++b) {
        by[b] = scales[b] * rebias<F>();
        usual = usual && (finite(by[b]) || bits_of(scales[b]) == kNaN32);
      }
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
