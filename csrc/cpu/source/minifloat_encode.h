// Floats of 8 bits out of fp32, of any number of blocks: what float8 and mx have in common.
#pragma once

#include "codec/minifloat.h"
#include "codec/random.h"
#include "cpu/source/memory.h"

namespace dtcomm::DTCOMM_ISA {

#if defined(__AVX2__)
typedef std::uint32_t Words __attribute__((vector_size(kVector)));

inline __attribute__((always_inline)) Words words_of(Floats x) { return reinterpret_cast<Words>(x); }

// Adding a large number of the same sign to t leaves units of t's last place in the sum's low bits and nothing else
// there but the large number's own: kOffset, such that units and exponent add up to the code modulo 256.
template <class F>
struct Large {
  static constexpr int kShift = 23 - F::kMantissa;
  static constexpr std::uint32_t kExponent = static_cast<std::uint32_t>(kShift) << 23;
  static constexpr std::uint32_t kOffset = (0U - (F::kNormal >> kShift) - (kExponent >> kShift)) & 0xff;
  static_assert(kOffset % 2 == 0, "an odd one would turn ties");
};

// The sum and the large number, for csrc/codec/minifloat.h's nearest_minifloat.
template <class F, bool Saturate>
inline __attribute__((always_inline)) void add_large(Floats t, Words& sum, Words& large) {
  const Words sign = words_of(t) & 0x80000000U, size = words_of(t) & 0x7fffffffU;
  Words held = size;
  if constexpr (Saturate) held = size < bits_of(F::kLargest) ? size : Words{} + bits_of(F::kLargest);
  const Words exponent = held & kInfinity32;
  large = (exponent > F::kNormal ? exponent : Words{} + F::kNormal) + (Large<F>::kExponent + Large<F>::kOffset);
  large |= sign;
  sum = words_of(reinterpret_cast<Floats>(Saturate ? held | sign : words_of(t)) + reinterpret_cast<Floats>(large));
}
#endif

#if defined(__AVX512F__)
// The codes of 64 elements as bytes; each row of 16 has an inverse of its own.
template <class F, bool Saturate>
inline __attribute__((always_inline)) __m512i minifloats_of(const float* x, const float* const inverse[4]) {
  typedef std::uint16_t Halves __attribute__((vector_size(kVector)));
  Words sums[4], large[4];
  for (int j = 0; j < 4; ++j) add_large<F, Saturate>(load(x + 16 * j) * *inverse[j], sums[j], large[j]);
  __m512i pairs[2];
  for (int j = 0; j < 2; ++j) {
    // Two rows side by side in words of 16 bits: the low halves of the sums, the high halves of what was added.
    constexpr __mmask32 kOdd = 0xaaaaaaaa;
    const auto low = reinterpret_cast<Halves>(_mm512_mask_blend_epi16(
        kOdd, reinterpret_cast<__m512i>(sums[2 * j]), reinterpret_cast<__m512i>(sums[2 * j + 1] << 16)));
    const auto high = reinterpret_cast<Halves>(_mm512_mask_blend_epi16(
        kOdd, reinterpret_cast<__m512i>(large[2 * j] >> 16), reinterpret_cast<__m512i>(large[2 * j + 1])));
    constexpr std::uint16_t kSignBit = 1 << F::kSign;
    pairs[j] = reinterpret_cast<__m512i>(static_cast<Halves>(((low + (high >> (Large<F>::kShift - 16))) & ~kSignBit) |
                                                             ((high >> (15 - F::kSign)) & kSignBit)));
  }
  const __m512i bytes = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, pairs[0], _mm512_slli_epi16(pairs[1], 8));
  // A double word holds one element of each row, in the order 0, 2, 1, 3: transpose.
  const __m512i fours = _mm512_set4_epi32(0x0f0b0703, 0x0d090501, 0x0e0a0602, 0x0c080400);
  const __m512i rows = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_maskz_permutexvar_epi32(0xffff, rows, _mm512_shuffle_epi8(bytes, fours));
}
#elif defined(__AVX2__)
// The codes of 32 elements as bytes; each row of 8 has an inverse of its own.
template <class F, bool Saturate>
inline __attribute__((always_inline)) __m256i minifloats_of(const float* x, const float* const inverse[4]) {
  __m256i codes[4];
  for (int j = 0; j < 4; ++j) {
    Words sum, large;
    add_large<F, Saturate>(load(x + 8 * j) * *inverse[j], sum, large);
    constexpr std::uint32_t kSignBit = 1U << F::kSign;
    codes[j] = reinterpret_cast<__m256i>(static_cast<Words>(((sum + (large >> Large<F>::kShift)) & (kSignBit - 1)) |
                                                            ((sum >> (31 - F::kSign)) & kSignBit)));
  }
  // The packs work within halves of the vector: put the groups of four back in order.
  const __m256i words[2] = {_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3])};
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words[0], words[1]),
                                     _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#endif

// The codes of `blocks` blocks to nearest. Saturate: where the scale may be so small that an element rounds to more
// than the largest number. What becomes of NaN is undefined: its block's codes are cleared afterwards.
template <class F, bool Saturate>
inline void minifloats_nearest(const float* x, std::size_t blocks, std::size_t block, const float* inverse,
                               std::uint8_t* codes) {
  std::size_t i = 0;
  const std::size_t n = blocks * block;
#if defined(__AVX2__)
  const int shift = __builtin_ctzll(block);
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    const float* by[4];
    for (std::size_t j = 0; j < 4; ++j) by[j] = inverse + ((i + j * kLanes) >> shift);
    const auto made = minifloats_of<F, Saturate>(x + i, by);
    __builtin_memcpy(codes + i, &made, sizeof made);
  }
#endif
  for (; i < n; i += 16) {
    const float by = inverse[i / block];
    const auto* in = cells<float>(x + i);
    for (std::size_t j = 0; j < 16; ++j) {
      codes[i + j] = static_cast<std::uint8_t>(nearest_minifloat<F>(in[j].value * by));
    }
  }
}

// The same at random; `index` is the first element's in the caller's tensor.
template <class F>
inline void minifloats_stochastic(const float* x, std::size_t blocks, std::size_t block, const float* inverse,
                                  std::uint64_t key, std::uint64_t index, std::uint8_t* codes) {
  const std::size_t n = blocks * block;
  for (std::size_t i = 0; i < n;) {
    // A stream ends where the index passes a multiple of 2^32.
    const std::uint64_t left = (std::uint64_t{1} << 32) - (index + i) % (std::uint64_t{1} << 32);
    const std::size_t run = smaller(smaller(n - i, block - i % block), static_cast<std::size_t>(left));
    const Stream stream = make_stream(key, index + i);
    const auto low = static_cast<std::uint32_t>(index + i);
    const float by = inverse[i / block];
    const auto* in = cells<float>(x + i);
    for (std::size_t j = 0; j < run; ++j) {
      const float random = uniform(stream, low + static_cast<std::uint32_t>(j));
      codes[i + j] = static_cast<std::uint8_t>(stochastic_minifloat<F>(in[j].value * by, random));
    }
    i += run;
  }
}

}  // namespace dtcomm::DTCOMM_ISA
