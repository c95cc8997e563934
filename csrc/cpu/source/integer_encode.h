// One granule into an integer codec, in L1: magnitudes, then all scales at once, then the codes.
#pragma once

#include "codec/integer.h"
#include "codec/layout.h"
#include "cpu/source/cast.h"
#include "cpu/source/integer_decode.h"

namespace dtcomm::DTCOMM_ISA {

struct Blocks {
  std::uint32_t top[kMostBlocks];  // bits of the largest magnitude
  float zero[kMostBlocks];
  float scale[kMostBlocks];
  float inverse[kMostBlocks];
};

#if defined(__AVX2__)
// The largest lane of each of 8 vectors (unsigned), in their order.
inline __m256i largest_lanes(const __m256i v[8]) {
  const auto pairs = [](__m256i a, __m256i b) {
    return _mm256_max_epu32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  };
  const auto fours = [](__m256i a, __m256i b) {
    return _mm256_max_epu32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  };
  const __m256i low = fours(pairs(v[0], v[1]), pairs(v[2], v[3]));
  const __m256i high = fours(pairs(v[4], v[5]), pairs(v[6], v[7]));
  return _mm256_max_epu32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}
#endif

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
  for (; b < blocks; ++b) {
    const auto* in = cells<float>(x) + b * block;
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < block; ++i) {
      const std::uint32_t size = magnitude(in[i].value);
      top = size > top ? size : top;
    }
    at.top[b] = top;
  }
}

// Floats as integers of the same order, and back: -0 before +0, and nothing lost.
inline std::int32_t order_of(float value) {
  const auto bits = static_cast<std::int32_t>(bits_of(value));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float from_order(std::int32_t order) {
  return float_of(static_cast<std::uint32_t>(order ^ ((order >> 31) & 0x7fffffff)));
}

// The zero points, and `top` becomes the block's range above its zero point.
inline void measure_ranges(const IntegerRules& rules, const float* x, std::size_t blocks, std::size_t block,
                           Blocks& at) {
  const auto* in = cells<float>(x);
  for (std::size_t b = 0; b < blocks; ++b, in += block) {
    // NaN comes out anywhere in this order; its block is known to be NaN already.
    std::int32_t low = order_of(in[0].value), high = low;
    for (std::size_t i = 0; i < block; ++i) {
      const std::int32_t order = order_of(in[i].value);
      low = order < low ? order : low;
      high = order > high ? order : high;
    }
    const bool bad = at.top[b] >= kInfinity32;
    const float zero = bad ? 0.0f : zero_of(rules, from_order(low));
    const std::uint32_t range = bad ? at.top[b] : magnitude(from_order(high) - zero);
    at.top[b] = range;
    at.zero[b] = range >= kInfinity32 ? 0.0f : zero;
  }
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

// Symmetric codes, to nearest.
template <std::size_t Block>
inline void codes_nearest(const float* x, std::size_t blocks, std::size_t length, const Blocks& at,
                          std::uint8_t* codes) {
  const std::size_t block = Block ? Block : length;
  for (std::size_t b = 0; b < blocks; ++b, x += block, codes += block) {
    const float inverse = at.inverse[b];
    // No clamp: a scale is at most a half unit of bf16 below top / 127, so |t| < 127.5 (docs/wire-format.md).
    std::size_t i = 0;
#if defined(__AVX2__)
    const __m256 by = _mm256_set1_ps(inverse);
    for (; i + 32 <= block; i += 32) {
      const auto eight = [&](std::size_t j) {
        return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + j), by));
      };
      const __m256i words[2] = {_mm256_packs_epi32(eight(0), eight(8)), _mm256_packs_epi32(eight(16), eight(24))};
      // The packs work within halves of the vector: put the groups of four back in order.
      const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]),
                                                        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), bytes);
    }
#endif
    for (; i < block; ++i) {
      codes[i] = static_cast<std::uint8_t>(bits_of(cells<float>(x)[i].value * inverse + kRound));
    }
  }
}

// codes[i] = make(x[i], i), in runs of a length that compilers know.
template <class Make>
inline __attribute__((always_inline)) void make_codes(const float* x, std::size_t block, std::uint8_t* codes,
                                                      const Make& make) {
  for (std::size_t i = 0; i < block; i += kSmallestBlock) {
    std::int32_t made[kSmallestBlock];
    for (std::size_t j = 0; j < kSmallestBlock; ++j) made[j] = make(cells<float>(x)[i + j].value, i + j);
    for (std::size_t j = 0; j < kSmallestBlock; ++j) codes[i + j] = static_cast<std::uint8_t>(made[j]);
  }
}

// Codes with zero points.
inline void codes_above_zero(const IntegerRules& rules, const float* x, std::size_t blocks, std::size_t block,
                             const Blocks& at, std::uint8_t* codes) {
  const float levels = rules.levels;
  for (std::size_t b = 0; b < blocks; ++b, x += block, codes += block) {
    const float zero = at.zero[b], inverse = at.inverse[b];
    make_codes(x, block, codes,
               [=](float value, std::size_t) { return nearest_code((value - zero) * inverse, 0.0f, levels); });
  }
}

// Stochastic codes of either kind.
inline void codes_stochastic(const Codec& codec, const IntegerRules& rules, const float* x, std::size_t blocks,
                             const Blocks& at, std::uint64_t key, std::uint64_t index, std::uint8_t* codes) {
  const float levels = rules.levels, lowest = codec.symmetric ? -levels : 0.0f;
  const std::size_t block = codec.block;
  const bool one_stream = index >> 32 == (index + blocks * block) >> 32;
  const Stream stream = make_stream(key, index);
  for (std::size_t b = 0; b < blocks; ++b, x += block, codes += block, index += block) {
    const float zero = at.zero[b], inverse = at.inverse[b];
    const auto low = static_cast<std::uint32_t>(index);
    const auto round = [=](float value, float random) {
      return stochastic_code((value - zero) * inverse, lowest, levels, random);
    };
    if (one_stream) {
      make_codes(x, block, codes, [=](float value, std::size_t i) {
        return round(value, uniform(stream, low + static_cast<std::uint32_t>(i)));
      });
    } else {
      make_codes(x, block, codes, [=](float value, std::size_t i) {
        return round(value, uniform(make_stream(key, index + i), low + static_cast<std::uint32_t>(i)));
      });
    }
  }
}

template <std::size_t Block>
inline void encode_blocks(const Codec& codec, const IntegerRules& rules, const float* x, std::size_t blocks,
                          std::uint64_t key, std::uint64_t index, std::uint8_t* fields, std::uint8_t* zeros,
                          std::uint8_t* codes) {
  Blocks at;
  measure<Block>(x, blocks, codec.block, at);
  if (codec.symmetric) {
    __builtin_memset(at.zero, 0, sizeof at.zero);
  } else {
    measure_ranges(rules, x, blocks, codec.block, at);
  }
  std::uint32_t worst = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    at.scale[b] = scale_of(rules, at.top[b]);
    worst = at.top[b] > worst ? at.top[b] : worst;
  }
  for (std::size_t b = 0; b < blocks; ++b) at.inverse[b] = inverse_of(at.scale[b]);
  store_fields(codec.scale, at.scale, blocks, fields);
  if (!codec.symmetric) store_fields(codec.scale, at.zero, blocks, zeros);
  if (codec.stochastic) {
    codes_stochastic(codec, rules, x, blocks, at, key, index, codes);
  } else if (codec.symmetric) {
    codes_nearest<Block>(x, blocks, codec.block, at, codes);
  } else {
    codes_above_zero(rules, x, blocks, codec.block, at, codes);
  }
  if (worst >= kInfinity32) {  // Inf * 0 and NaN left their traces in the codes of these blocks
    for (std::size_t b = 0; b < blocks; ++b) {
      if (at.top[b] >= kInfinity32) __builtin_memset(codes + b * codec.block, 0, codec.block);
    }
  }
}

template <std::size_t Block>
inline void encode_integer(const Codec& codec, const IntegerRules& rules, const Layout& layout, const float* x,
                           std::size_t n, std::uint64_t key, std::uint64_t index, std::uint8_t* to) {
  const std::size_t block = codec.block, whole = n / block, rest = n % block;
  std::uint8_t* zeros = to + layout.zeros_at(n);
  std::uint8_t* codes = to + layout.codes_at(n);
  encode_blocks<Block>(codec, rules, x, whole, key, index, to, zeros, codes);
  if (rest) {
    // The missing elements of the last block repeat its last one, so that they change neither scale nor zero point.
    float last[kLargestBlock];
    __builtin_memcpy(last, x + whole * block, rest * sizeof(float));
    for (std::size_t i = rest; i < block; ++i) last[i] = last[rest - 1];
    std::uint8_t* tail = codes + whole * block;
    encode_blocks<Block>(codec, rules, last, 1, key, index + whole * block, to + whole * layout.field_bytes,
                         zeros + whole * layout.field_bytes, tail);
    __builtin_memset(tail + rest, 0, block - rest);
  }
  __builtin_memset(to + layout.used(n), 0, layout.bytes(n) - layout.used(n));
}

}  // namespace dtcomm::DTCOMM_ISA
