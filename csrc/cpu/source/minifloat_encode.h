// Encodes fp32 to small floats, for any number of blocks; float8 and mx share it.
#pragma once

#include "codec/counter_rng.h"
#include "codec/minifloat.h"
#include "cpu/source/bit_planes.h"
#include "cpu/source/codec_family.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

#if defined(__AVX2__)
typedef std::uint32_t Words __attribute__((vector_size(kVector)));
typedef std::uint16_t Halves __attribute__((vector_size(kVector)));

// Adding a large number of the same sign to t leaves units of t's last place in the sum's low bits and nothing else
// there but the large number's own: kOffset. Units, offset and exponent, in units, add up to kBase and the code's size.
template <class F>
struct Large {
  static constexpr int kShift = 23 - F::kMantissa;
  static constexpr std::uint32_t kExponent = static_cast<std::uint32_t>(kShift) << 23;
  static constexpr std::uint32_t kLeast = (F::kNormal >> kShift) + (kExponent >> kShift);
  static constexpr std::uint32_t kOffset = (0U - kLeast) & ((2U << F::kSign) - 1);
  static constexpr std::uint32_t kBase = kLeast + kOffset;
  static_assert(kOffset % 2 == 0, "an odd one would turn ties");
  static_assert((kBase + 2 * F::kTop) << (kShift - 16) < 0x8000, "and it is a positive word, kShift - 16 bits up");
};

// The sum, whose upper bits are sign and exponent of the large number.
template <class F>
inline __attribute__((always_inline)) Words add_large(Floats t) {
  Words exponent = reinterpret_cast<Words>(t) & 0xff800000U;  // and sign
#if defined(__AVX512F__)
  const __m512 least = _mm512_set1_ps(float_of(F::kNormal));
  // The larger magnitude, with the sign of the first.
  exponent = reinterpret_cast<Words>(_mm512_maskz_range_ps(0xffff, reinterpret_cast<__m512>(exponent), least, 3));
#else
  const Words sign = exponent & 0x80000000U, size = exponent & 0x7fffffffU;
  exponent = (size > F::kNormal ? size : Words{} + F::kNormal) | sign;
#endif
  const Words large = exponent + (Large<F>::kExponent + Large<F>::kOffset);
  return reinterpret_cast<Words>(t + reinterpret_cast<Floats>(large));
}

#if defined(__AVX512F__)
typedef __m512i Bytes;
#else
typedef __m256i Bytes;
#endif

// Codes, a word each, out of kBase and size, above kShift - 16 other bits and below the sign.
template <class F, bool Saturate>
inline __attribute__((always_inline)) Bytes codes_of(Bytes words) {
  constexpr std::uint16_t kSignBit = 1 << F::kSign, kSizes = kSignBit - 1;
  constexpr int kUp = Large<F>::kShift - 16;
  const Halves sign = reinterpret_cast<Halves>(words) >> (15 - F::kSign);  // and, below it, what the select drops
  Halves size = reinterpret_cast<Halves>(words);
  if constexpr (Saturate) {
    size &= 0x7fff;
    const Halves top = Halves{} + static_cast<std::uint16_t>((Large<F>::kBase + F::kTop) << kUp);
#if defined(__AVX512F__)
    size = reinterpret_cast<Halves>(
        _mm512_maskz_min_epu16(0xffffffff, reinterpret_cast<Bytes>(size), reinterpret_cast<Bytes>(top)));
#else
    size = reinterpret_cast<Halves>(_mm256_min_epu16(reinterpret_cast<Bytes>(size), reinterpret_cast<Bytes>(top)));
#endif
  }
  size = size >> kUp;
#if defined(__AVX512F__)
  const Bytes sizes = reinterpret_cast<Bytes>(Halves{} + kSizes);
  return _mm512_ternarylogic_epi32(sizes, reinterpret_cast<Bytes>(size), reinterpret_cast<Bytes>(sign), 0xca);  // ?:
#else
  return reinterpret_cast<Bytes>((size & kSizes) | (sign & kSignBit));
#endif
}

// The codes of four rows of kLanes elements, a byte each; every row has an inverse of its own.
template <class F, bool Saturate>
inline __attribute__((always_inline)) Bytes minifloats_of(const float* x, const Floats inverse[4]) {
  // A multiply-add joins the halves of a sum: its units and its offset, and what stands above them with the sign. The
  // packs work within quarters (halves) of the vectors: put the groups of four back in order.
  constexpr int kJoin = 1 << 16 | 1 << (Large<F>::kShift - 16);
  Bytes sums[4];
#if defined(__AVX512F__)
  for (std::size_t j = 0; j < 4; ++j) {
    const auto sum = reinterpret_cast<Bytes>(add_large<F>(load(x + kLanes * j) * inverse[j]));
    sums[j] = _mm512_madd_epi16(sum, _mm512_set1_epi32(kJoin));
  }
  const Bytes words[2] = {_mm512_packs_epi32(sums[0], sums[1]), _mm512_packs_epi32(sums[2], sums[3])};
  const Bytes bytes = _mm512_packus_epi16(codes_of<F, Saturate>(words[0]), codes_of<F, Saturate>(words[1]));
  return _mm512_maskz_permutexvar_epi32(0xffff, _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                        bytes);
#else
  for (std::size_t j = 0; j < 4; ++j) {
    const auto sum = reinterpret_cast<Bytes>(add_large<F>(load(x + kLanes * j) * inverse[j]));
    sums[j] = _mm256_madd_epi16(sum, _mm256_set1_epi32(kJoin));
  }
  const Bytes words[2] = {_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3])};
  const Bytes bytes = _mm256_packus_epi16(codes_of<F, Saturate>(words[0]), codes_of<F, Saturate>(words[1]));
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
}

// Codes into memory, of 8 bits or of 4: then two neighbours share a byte, the earlier one its lower half.
template <class F>
inline __attribute__((always_inline)) void store_codes(std::uint8_t* to, Bytes codes) {
#if defined(__AVX512F__)
  if constexpr (F::kSign == 3) {
    const Bytes pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi16_epi8(0xffffffff, pairs));
  } else {
    _mm512_storeu_si512(to, codes);
  }
#else
  if constexpr (F::kSign == 3) {
    const Bytes pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
    const Bytes bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(bytes));
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes);
  }
#endif
}
#elif defined(DTCOMM_NEON)
// nearest_minifloat (codec/minifloat.h) of four elements.
template <class F>
inline __attribute__((always_inline)) uint32x4_t nearest_minifloats(Floats t) {
  const Floats largest = vdupq_n_f32(F::kLargest), magnitudes = vabsq_f32(t);
  const Floats clipped = vbslq_f32(vcltq_f32(magnitudes, largest), magnitudes, largest);
  const uint32x4_t upper = vandq_u32(vreinterpretq_u32_f32(clipped), vdupq_n_u32(0xff800000));
  const uint32x4_t exponent = vmaxq_u32(upper, vdupq_n_u32(F::kNormal));
  const uint32x4_t large = vaddq_u32(exponent, vdupq_n_u32(std::uint32_t{23 - F::kMantissa} << 23));
  const Floats sum = vaddq_f32(clipped, vreinterpretq_f32_u32(large));
  const uint32x4_t units = vsubq_u32(vreinterpretq_u32_f32(sum), large);
  const uint32x4_t above = vshrq_n_u32(vsubq_u32(exponent, vdupq_n_u32(F::kNormal)), 23 - F::kMantissa);
  const uint32x4_t sign = vshrq_n_u32(vreinterpretq_u32_f32(t), 31 - F::kSign);
  return vbslq_u32(vdupq_n_u32(1U << F::kSign), sign, vaddq_u32(units, above));
}
#endif

// Clears the codes of blocks whose inverse is 0: zero blocks may have signs, NaN blocks anything.
inline void clear_unusable(const float* inverse, std::size_t blocks, std::size_t bytes, std::uint8_t* codes) {
  std::uint32_t least = ~0U;
  for (std::size_t b = 0; b < blocks; ++b) least = bits_of(inverse[b]) < least ? bits_of(inverse[b]) : least;
  if (least != 0) return;
  for (std::size_t b = 0; b < blocks; ++b) {
    if (inverse[b] == 0.0f) __builtin_memset(codes + b * bytes, 0, bytes);
  }
}

// Encodes `blocks` blocks, rounding to nearest; codes are zeros if the inverse is 0. Saturate: the scale may be so
// small that an element rounds to more than the largest number.
template <class F, bool Saturate>
inline void minifloats_nearest(const float* x, std::size_t blocks, std::size_t block, const float* inverse,
                               [[maybe_unused]] const EncodeArgs& args, std::uint8_t* codes) {
  constexpr std::size_t kShare = F::kSign == 3 ? 2 : 1;  // codes in a byte
  std::size_t i = 0;
  const std::size_t n = blocks * block;
#if defined(__AVX2__)
  const int shift = __builtin_ctzll(block);
  const auto inverse_at = [&](std::size_t at) { return Floats{} + inverse[at >> shift]; };
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    if (i % 64 == 0) prefetch_next(args, i);
    const Floats first = inverse_at(i);
    Floats by[4] = {first, first, first, first};
    if (block < 4 * kLanes) {
      for (std::size_t j = 1; j < 4; ++j) by[j] = inverse_at(i + j * kLanes);
    }
    store_codes<F>(codes + i / kShare, minifloats_of<F, Saturate>(x + i, by));
  }
#elif defined(DTCOMM_NEON)
  const int shift = __builtin_ctzll(block);
  for (; i < n; i += 16) {
    if (i % 64 == 0) prefetch_next(args, i);
    const float by = inverse[i >> shift];
    const auto four = [&](std::size_t at) { return nearest_minifloats<F>(vmulq_n_f32(load(x + i + at), by)); };
    const uint16x8_t low = vmovn_high_u32(vmovn_u32(four(0)), four(4));
    const uint16x8_t high = vmovn_high_u32(vmovn_u32(four(8)), four(12));
    const uint8x16_t made = vmovn_high_u16(vmovn_u16(low), high);
    if constexpr (kShare == 2) {
      vst1_u8(codes + i / 2, join_neighbours<4>(made));
    } else {
      vst1q_u8(codes + i, made);
    }
  }
#endif
  for (; i < n; i += 16) {
    const float by = inverse[i / block];
    const auto* in = unaligned<float>(x + i);
    std::uint8_t made[16];
    for (std::size_t j = 0; j < 16; ++j) made[j] = static_cast<std::uint8_t>(nearest_minifloat<F>(in[j].value * by));
    if constexpr (kShare == 2) {
      for (std::size_t j = 0; j < 8; ++j) {
        codes[i / 2 + j] = static_cast<std::uint8_t>(made[2 * j] | made[2 * j + 1] << 4);
      }
    } else {
      __builtin_memcpy(codes + i, made, sizeof made);
    }
  }
  clear_unusable(inverse, blocks, block / kShare, codes);
}

// The same with stochastic rounding; `index` is the index of the first element in the caller's tensor.
template <class F>
inline void minifloats_stochastic(const float* x, std::size_t blocks, std::size_t block, const float* inverse,
                                  std::uint64_t key, std::uint64_t index, std::uint8_t* codes) {
  const std::size_t n = blocks * block;
  const bool one_stream = index >> 32 == (index + n) >> 32;
  const Stream stream = make_stream(key, index);
  const auto low = static_cast<std::uint32_t>(index);
  for (std::size_t i = 0; i < n; i += 16) {  // in runs of a length that compilers know
    const float by = inverse[i / block];
    const auto* in = unaligned<float>(x + i);
    std::uint32_t made[16];
    if (one_stream) {
      for (std::size_t j = 0; j < 16; ++j) {
        made[j] = stochastic_minifloat<F>(in[j].value * by, uniform(stream, low + static_cast<std::uint32_t>(i + j)));
      }
    } else {
      for (std::size_t j = 0; j < 16; ++j) {
        const float random = uniform(make_stream(key, index + i + j), low + static_cast<std::uint32_t>(i + j));
        made[j] = stochastic_minifloat<F>(in[j].value * by, random);
      }
    }
    for (std::size_t j = 0; j < 16; ++j) codes[i + j] = static_cast<std::uint8_t>(made[j]);
  }
  clear_unusable(inverse, blocks, block, codes);
}

}  // namespace dtcomm::DTCOMM_ISA
