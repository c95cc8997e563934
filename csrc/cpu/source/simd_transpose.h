// Reduces the lanes of eight vectors at once.
#pragma once

#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

#if defined(__AVX2__)
// Lane j of the result is the reduction of all lanes of v[j] by `join`, a maximum or a minimum.
template <class Join>
inline __attribute__((always_inline)) __m256i join_lanes(const __m256i (&v)[8], const Join& join) {
  const auto pairs = [&](__m256i a, __m256i b) {
    return join(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  };
  const auto fours = [&](__m256i a, __m256i b) {
    return join(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  };
  const __m256i low = fours(pairs(v[0], v[1]), pairs(v[2], v[3]));
  const __m256i high = fours(pairs(v[4], v[5]), pairs(v[6], v[7]));
  return join(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}
#endif

}  // namespace dtcomm::DTCOMM_ISA
