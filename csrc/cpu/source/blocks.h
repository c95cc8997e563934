// What the formats with one scale per block share: cutting a granule into blocks, the blocks' largest magnitudes, and
// reading and writing scales and zero points.
#pragma once

#include "codec/cast.h"
#include "codec/layout.h"
#include "codec/outliers.h"
#include "cpu/source/loops.h"
#include "cpu/source/simd_transpose.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

static_assert(most_blocks(Family::integer) <= kMostBlocks && most_blocks(Family::float8) <= kMostBlocks &&
                  most_blocks(Family::mx, 32) <= kMostBlocks && most_blocks(Family::sign) <= kMostBlocks,
              "the blocks of a granule fit into arrays of kMostBlocks elements");

struct Blocks {
  std::uint32_t top[kMostBlocks];  // bits of the largest magnitude
  float zero[kMostBlocks];
  float scale[kMostBlocks];
  float inverse[kMostBlocks];
};

#if defined(__AVX2__)
// Lane j of the result is the largest lane of v[j] (unsigned).
inline __attribute__((always_inline)) __m256i largest_lanes(const __m256i (&v)[8]) {
  return join_lanes(v, [](__m256i a, __m256i b) { return _mm256_max_epu32(a, b); });
}
#endif

inline std::uint32_t largest(const float* x, std::size_t n) {
  const auto* in = unaligned<float>(x);
  std::uint32_t top = 0;
  std::size_t i = 0;
#if defined(DTCOMM_NEON)
  uint32x4_t tops[2] = {vdupq_n_u32(0), vdupq_n_u32(0)};
  for (const std::size_t whole = n / (2 * kLanes) * (2 * kLanes); i < whole; i += 2 * kLanes) {
    for (std::size_t j = 0; j < 2; ++j) {
      tops[j] = vmaxq_u32(tops[j], vreinterpretq_u32_f32(vabsq_f32(load(x + i + j * kLanes))));
    }
  }
  top = vmaxvq_u32(vmaxq_u32(tops[0], tops[1]));
#endif
  for (; i < n; ++i) {
    const std::uint32_t size = magnitude(in[i].value);
    top = size > top ? size : top;
  }
  return top;
}

// Block is the block length, or 0 if it is known at run time only; 16 divides every block.
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

// The smallest and the largest element of blocks, in the order of float_order (codec/outliers.h).
struct Ranges {
  static constexpr std::size_t kMost = kVariableGranule / kSmallestBlock;
  std::int32_t least[kMost], most[kMost];
};
static_assert(most_blocks(Family::variable) == Ranges::kMost, "the smallest blocks are the most");

#if defined(__AVX2__)
// The smallest lane of each of 8 vectors, in their order.
inline __attribute__((always_inline)) __m256i least_lanes(const __m256i (&v)[8]) {
  return join_lanes(v, [](__m256i a, __m256i b) { return _mm256_min_epi32(a, b); });
}

// Up to 8 blocks at once, which share the shuffles that look for the smallest lane. Block == 0 stands for a block
// length known at run time.
template <std::size_t Block>
inline void measure_orders(const float* x, std::size_t blocks, std::size_t length, Ranges& ranges) {
  const std::size_t block = Block ? Block : length;
  const __m256i mask = _mm256_set1_epi32(0x7fffffff), ones = _mm256_set1_epi32(-1);
  for (std::size_t b = 0; b < blocks; b += 8) {
    __m256i least[8], most[8];
    const std::size_t count = smaller(8, blocks - b);
    for (std::size_t j = 0; j < 8; ++j) {
      const float* in = x + (b + (j < count ? j : 0)) * block;
      __m256i low = mask, high = _mm256_set1_epi32(INT32_MIN);
      for (std::size_t i = 0; i < block; i += 8) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
        const __m256i order = _mm256_xor_si256(bits, _mm256_and_si256(_mm256_srai_epi32(bits, 31), mask));
        low = _mm256_min_epi32(low, order);
        high = _mm256_max_epi32(high, order);
      }
      least[j] = low;
      most[j] = _mm256_xor_si256(high, ones);  // the opposite order: the largest becomes the smallest
    }
    const __m256i low = least_lanes(least), high = _mm256_xor_si256(least_lanes(most), ones);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(ranges.least + b), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(ranges.most + b), high);
  }
}
#endif

// The same for all blocks of n elements, the last of which may be incomplete.
inline void measure_orders(const float* x, std::size_t n, std::size_t block, Ranges& ranges) {
  std::size_t b = 0;
#if defined(__AVX2__)
  b = n >> __builtin_ctzll(block);
  block == 32 ? measure_orders<32>(x, b, block, ranges) : measure_orders<0>(x, b, block, ranges);
#endif
  for (; b * block < n; ++b) {
    const auto* in = unaligned<float>(x) + b * block;
    const std::size_t length = smaller(block, n - b * block);
    std::int32_t low = float_order(in[0].value), high = low;
    for (std::size_t i = 0; i < length; ++i) {
      const std::int32_t order = float_order(in[i].value);
      low = order < low ? order : low;
      high = order > high ? order : high;
    }
    ranges.least[b] = low;
    ranges.most[b] = high;
  }
}

inline void store_fields(Scale type, const float* values, std::size_t blocks, std::uint8_t* to) {
  if (type == Scale::fp32) {
    __builtin_memcpy(to, values, blocks * sizeof(float));
    return;
  }
  auto* out = unaligned<std::uint16_t>(to);
  DTCOMM_INDEPENDENT
  for (std::size_t b = 0; b < blocks; ++b) out[b].value = static_cast<std::uint16_t>(bits_of(values[b]) >> 16);
}

inline void load_fields(Scale type, const std::uint8_t* from, std::size_t blocks, float* values) {
  if (type == Scale::fp32) {
    __builtin_memcpy(values, from, blocks * sizeof(float));
    return;
  }
  const auto* in = unaligned<std::uint16_t>(from);
  for (std::size_t b = 0; b < blocks; ++b) values[b] = float_from_bf16(in[b].value);
}

// How a granule of n elements is cut into blocks.
struct BlockCut {
  std::size_t whole, rest;  // blocks, and elements beyond them
  std::size_t blocks;       // including the last, incomplete one
  std::size_t codes;        // offset of the codes in bytes
  std::size_t used, bytes;  // of the granule, without and with the padding

  BlockCut(const Layout& layout, std::size_t n) {
    whole = n >> layout.block_shift;
    rest = n & (layout.block - 1);
    blocks = whole + (rest ? 1 : 0);
    codes = blocks * layout.field_bytes;
    used = codes + (blocks * layout.block * layout.code_bits / 8) + layout.trailer;
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
