// What the formats with a scale per block share: the blocks' magnitudes, and their scales and zero points as bytes.
#pragma once

#include "codec/cast.h"
#include "codec/layout.h"
#include "cpu/source/lanes.h"
#include "cpu/source/memory.h"

namespace dtcomm::DTCOMM_ISA {

constexpr std::size_t kMostBlocks = kGranule / kSmallestBlock;

struct Blocks {
  std::uint32_t top[kMostBlocks];  // bits of the largest magnitude
  float zero[kMostBlocks];
  float scale[kMostBlocks];
  float inverse[kMostBlocks];
};

#if defined(__AVX2__)
// The largest lane of each of 8 vectors (unsigned), in their order.
inline __attribute__((always_inline)) __m256i largest_lanes(const __m256i (&v)[8]) {
  return join_lanes(v, [](__m256i a, __m256i b) { return _mm256_max_epu32(a, b); });
}
#endif

inline std::uint32_t largest(const float* x, std::size_t n) {
  const auto* in = cells<float>(x);
  std::uint32_t top = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t size = magnitude(in[i].value);
    top = size > top ? size : top;
  }
  return top;
}

// Block == 0 stands for a block length known at run time; 16 divides every block.
template <std::size_t Block>
inline void measure(const float* x, std::size_t blocks, std::size_t length, Blocks& at) {
  const std::size_t block = Block ? Block : length;
  std::size_t b = 0;
#if defined(__AVX2__)
  // Eight blocks share the shuffles that look for the largest lane.
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  for (; b + 8 <= blocks; b += 8) {
    __m256i tops[8];
    for (std::size_t j = 0; j < 8; ++j) {
      const float* in = x + (b + j) * block;
      __m256i top = _mm256_setzero_si256();
      for (std::size_t i = 0; i < block; i += 8) {
        top = _mm256_max_epu32(top, _mm256_and_si256(mask, _mm256_castps_si256(_mm256_loadu_ps(in + i))));
      }
      tops[j] = top;
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at.top + b), largest_lanes(tops));
  }
#endif
  for (; b < blocks; ++b) at.top[b] = largest(x + b * block, block);
}

inline void store_fields(Scale type, const float* values, std::size_t blocks, std::uint8_t* to) {
  if (type == Scale::fp32) {
    __builtin_memcpy(to, values, blocks * sizeof(float));
    return;
  }
  auto* out = cells<std::uint16_t>(to);
#pragma GCC ivdep
  for (std::size_t b = 0; b < blocks; ++b) out[b].value = static_cast<std::uint16_t>(bits_of(values[b]) >> 16);
}

inline void load_fields(Scale type, const std::uint8_t* from, std::size_t blocks, float* values) {
  if (type == Scale::fp32) {
    __builtin_memcpy(values, from, blocks * sizeof(float));
    return;
  }
  const auto* in = cells<std::uint16_t>(from);
  for (std::size_t b = 0; b < blocks; ++b) values[b] = float_from_bf16(in[b].value);
}

}  // namespace dtcomm::DTCOMM_ISA
