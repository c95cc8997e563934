// What the families with one scale a block and nothing else beside their codes have in common.
#pragma once

#include "cpu/source/blocks.h"

namespace dtcomm::DTCOMM_ISA {

// A granule of n elements as blocks.
struct Cut {
  std::size_t whole, rest;  // blocks, and elements beyond them
  std::size_t blocks;       // with the cut one
  std::size_t codes;        // bytes before them
  std::size_t used, bytes;  // without and with the padding

  Cut(const Layout& layout, std::size_t n) {
    whole = n >> layout.block_shift;
    rest = n & (layout.block - 1);
    blocks = whole + (rest ? 1 : 0);
    codes = blocks * layout.field_bytes;
    used = codes + (blocks * layout.block * layout.code_bits / 8);
    bytes = (used + kAlign - 1) / kAlign * kAlign;
  }

  void pad(std::uint8_t* to) const {
    if (bytes != used) __builtin_memset(to + used, 0, bytes - used);
  }
};

// The largest magnitudes of four blocks of 16 or more.
inline void largest_of_four(const float* x, std::size_t block, std::uint32_t* top) {
#if defined(__AVX2__)
  __m256i tops[4];
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  for (auto& each : tops) each = _mm256_setzero_si256();
  for (std::size_t i = 0; i < block; i += 8) {
    for (std::size_t j = 0; j < 4; ++j) {
      const __m256i size = _mm256_and_si256(mask, _mm256_castps_si256(_mm256_loadu_ps(x + j * block + i)));
      tops[j] = _mm256_max_epu32(tops[j], size);
    }
  }
  const auto halves = [](__m256i a) {
    return _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  };
  const auto pairs = [](__m128i a, __m128i b) {
    return _mm_max_epu32(_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
  };
  const __m128i low = pairs(halves(tops[0]), halves(tops[1])), high = pairs(halves(tops[2]), halves(tops[3]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(top),
                   _mm_max_epu32(_mm_unpacklo_epi64(low, high), _mm_unpackhi_epi64(low, high)));
#else
  for (std::size_t j = 0; j < 4; ++j) top[j] = largest(x + j * block, block);
#endif
}

}  // namespace dtcomm::DTCOMM_ISA
