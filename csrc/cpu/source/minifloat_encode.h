// Floats of 8 bits out of fp32, of any number of blocks: what float8 and mx have in common.
#pragma once

#include "codec/minifloat.h"
#include "codec/random.h"
#include "cpu/source/memory.h"

namespace dtcomm::DTCOMM_ISA {

#if defined(__AVX2__)
typedef std::uint32_t Words __attribute__((vector_size(kVector)));
typedef std::uint16_t Halves __attribute__((vector_size(kVector)));

// Adding a large number of the same sign to t leaves units of t's last place in the sum's low bits and nothing else
// there but the large number's own: kOffset, such that units and exponent add up to the code modulo 256.
template <class F>
struct Large {
  static constexpr int kShift = 23 - F::kMantissa;
  static constexpr std::uint32_t kExponent = static_cast<std::uint32_t>(kShift) << 23;
  static constexpr std::uint32_t kOffset = (0U - (F::kNormal >> kShift) - (kExponent >> kShift)) & 0xff;
  static_assert(kOffset % 2 == 0, "an odd one would turn ties");
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

// Codes out of the lower and the upper halves of the sums.
template <class F, bool Saturate>
inline __attribute__((always_inline)) Bytes codes_of(Bytes low, Bytes high) {
  constexpr std::uint16_t kSignBit = 1 << F::kSign, kSizes = kSignBit - 1;
  const Halves above = reinterpret_cast<Halves>(high);
  const Halves sign = above >> (15 - F::kSign);  // and, below it, what the select drops
  Halves size = reinterpret_cast<Halves>(low) + (above >> (Large<F>::kShift - 16));
  if constexpr (Saturate) {
    size &= 0xff;
    const Halves top = Halves{} + static_cast<std::uint16_t>(F::kTop);
#if defined(__AVX512F__)
    size = reinterpret_cast<Halves>(
        _mm512_maskz_min_epu16(0xffffffff, reinterpret_cast<Bytes>(size), reinterpret_cast<Bytes>(top)));
#else
    size = reinterpret_cast<Halves>(_mm256_min_epu16(reinterpret_cast<Bytes>(size), reinterpret_cast<Bytes>(top)));
#endif
  }
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
  Bytes sums[4];
  for (std::size_t j = 0; j < 4; ++j) {
    sums[j] = reinterpret_cast<Bytes>(add_large<F>(load(x + kLanes * j) * inverse[j]));
  }
  Bytes pairs[2];
#if defined(__AVX512F__)
  const Bytes even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                      22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const Bytes odd = _mm512_or_si512(even, _mm512_set1_epi16(1));
  for (int j = 0; j < 2; ++j) {
    const Bytes low = _mm512_permutex2var_epi16(sums[2 * j], even, sums[2 * j + 1]);
    const Bytes high = _mm512_permutex2var_epi16(sums[2 * j], odd, sums[2 * j + 1]);
    pairs[j] = codes_of<F, Saturate>(low, high);
  }
  // The pack works within quarters of the vector: put the groups of eight back in order.
  return _mm512_maskz_permutexvar_epi64(0xff, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                                        _mm512_packus_epi16(pairs[0], pairs[1]));
#else
  for (int j = 0; j < 2; ++j) {
    const Bytes low = _mm256_blend_epi16(sums[2 * j], _mm256_slli_epi32(sums[2 * j + 1], 16), 0xaa);
    const Bytes high = _mm256_blend_epi16(_mm256_srli_epi32(sums[2 * j], 16), sums[2 * j + 1], 0xaa);
    pairs[j] = codes_of<F, Saturate>(low, high);
  }
  // A double word holds one element of each row, in the order 0, 2, 1, 3: transpose.
  const Bytes mixed = _mm256_or_si256(pairs[0], _mm256_slli_epi16(pairs[1], 8));
  const __m128i fours = _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
  return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(mixed, _mm256_broadcastsi128_si256(fours)),
                                     _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
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
#endif

// Blocks whose inverse is 0 have zeros for codes: zero blocks may have signs, NaN blocks anything.
inline void clear_unusable(const float* inverse, std::size_t blocks, std::size_t bytes, std::uint8_t* codes) {
  std::uint32_t least = ~0U;
  for (std::size_t b = 0; b < blocks; ++b) least = bits_of(inverse[b]) < least ? bits_of(inverse[b]) : least;
  if (least != 0) return;
  for (std::size_t b = 0; b < blocks; ++b) {
    if (inverse[b] == 0.0f) __builtin_memset(codes + b * bytes, 0, bytes);
  }
}

// The codes of `blocks` blocks to nearest; zeros where the inverse is 0. Saturate: where the scale may be so small that
// an element rounds to more than the largest number.
template <class F, bool Saturate>
inline void minifloats_nearest(const float* x, std::size_t blocks, std::size_t block, const float* inverse,
                               std::uint8_t* codes) {
  constexpr std::size_t kShare = F::kSign == 3 ? 2 : 1;  // codes in a byte
  std::size_t i = 0;
  const std::size_t n = blocks * block;
#if defined(__AVX2__)
  const int shift = __builtin_ctzll(block);
  // What is measured next: the next granule, where this one is the caller's.
  const auto ahead = reinterpret_cast<std::uintptr_t>(x) + n * sizeof(float);
  const auto inverse_at = [&](std::size_t at) { return Floats{} + inverse[at >> shift]; };
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (std::size_t j = 0; j < 4 * kLanes; j += kLine / sizeof(float)) {
      __builtin_prefetch(reinterpret_cast<const void*>(ahead + (i + j) * sizeof(float)));
    }
    const Floats first = inverse_at(i);
    Floats by[4] = {first, first, first, first};
    if (block < 4 * kLanes) {
      for (std::size_t j = 1; j < 4; ++j) by[j] = inverse_at(i + j * kLanes);
    }
    store_codes<F>(codes + i / kShare, minifloats_of<F, Saturate>(x + i, by));
  }
#endif
  for (; i < n; i += 16) {
    const float by = inverse[i / block];
    const auto* in = cells<float>(x + i);
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

// The same at random; `index` is the first element's in the caller's tensor.
template <class F>
inline void minifloats_stochastic(const float* x, std::size_t blocks, std::size_t block, const float* inverse,
                                  std::uint64_t key, std::uint64_t index, std::uint8_t* codes) {
  const std::size_t n = blocks * block;
  const bool one_stream = index >> 32 == (index + n) >> 32;
  const Stream stream = make_stream(key, index);
  const auto low = static_cast<std::uint32_t>(index);
  for (std::size_t i = 0; i < n; i += 16) {  // in runs of a length that compilers know
    const float by = inverse[i / block];
    const auto* in = cells<float>(x + i);
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
