// One granule of an integer codec, in L1: magnitudes, then all scales at once, then the codes.
#pragma once

#include "codec/cast.h"
#include "codec/integer.h"
#include "codec/layout.h"
#include "cpu/source/memory.h"

namespace dtcomm::DTCOMM_ISA {

constexpr std::size_t kMostBlocks = kGranule / kSmallestBlock;

struct Blocks {
  std::uint32_t top[kMostBlocks];  // bits of the largest magnitude
  float zero[kMostBlocks];
  float scale[kMostBlocks];
  float inverse[kMostBlocks];
};

// Block == 0 stands for a block length known at run time; 16 divides every block.
template <std::size_t Block>
inline void measure(const float* x, std::size_t blocks, std::size_t length, Blocks& at) {
  const std::size_t block = Block ? Block : length;
  const auto* in = cells<float>(x);
  for (std::size_t b = 0; b < blocks; ++b, in += block) {
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < block; ++i) {
      const std::uint32_t size = magnitude(in[i].value);
      top = size > top ? size : top;
    }
    at.top[b] = top;
  }
}

// The zero points, and `top` becomes the block's range above its zero point.
template <std::size_t Block>
inline void measure_ranges(const IntegerRules& rules, const float* x, std::size_t blocks, std::size_t length,
                           Blocks& at) {
  const std::size_t block = Block ? Block : length;
  const auto* in = cells<float>(x);
  for (std::size_t b = 0; b < blocks; ++b, in += block) {
    // The order of the comparisons cannot show: NaN makes the block NaN, and of two zeros zero_of makes +0.
    float low = in[0].value, high = in[0].value;
    for (std::size_t i = 0; i < block; ++i) {
      const float value = in[i].value;
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    const bool bad = at.top[b] >= kInfinity32;
    at.zero[b] = bad ? 0.0f : zero_of(rules, low);
    const std::uint32_t range = magnitude(high - at.zero[b]);
    at.top[b] = bad ? at.top[b] : range;
    at.zero[b] = range >= kInfinity32 ? 0.0f : at.zero[b];
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

inline void load_fields(Scale type, const std::uint8_t* from, std::size_t blocks, float* values) {
  if (type == Scale::fp32) {
    __builtin_memcpy(values, from, blocks * sizeof(float));
    return;
  }
  const auto* in = cells<std::uint16_t>(from);
  for (std::size_t b = 0; b < blocks; ++b) values[b] = float_from_bf16(in[b].value);
}

template <std::size_t Block>
inline void codes_nearest(const float* x, std::size_t blocks, std::size_t length, const Blocks& at,
                          std::uint8_t* codes) {
  const std::size_t block = Block ? Block : length;
  const auto* in = cells<float>(x);
  for (std::size_t b = 0; b < blocks; ++b, in += block, codes += block) {
    const float inverse = at.inverse[b];
    // No clamp: a scale is at most a half unit of bf16 below top / 127, so |t| < 127.5 (docs/wire-format.md).
    for (std::size_t i = 0; i < block; ++i) {
      codes[i] = static_cast<std::uint8_t>(bits_of(in[i].value * inverse + kRound));
    }
  }
}

// Zero points and stochastic rounding: the readable form.
inline void codes_general(const Codec& codec, const IntegerRules& rules, const float* x, std::size_t blocks,
                          const Blocks& at, std::uint64_t key, std::uint64_t index, std::uint8_t* codes) {
  const auto* in = cells<float>(x);
  const float lowest = codec.symmetric ? -rules.levels : 0.0f;
  const std::size_t block = codec.block;
  for (std::size_t b = 0; b < blocks; ++b, in += block, codes += block, index += block) {
    const float zero = at.zero[b], inverse = at.inverse[b];
    if (!codec.stochastic) {
      for (std::size_t i = 0; i < block; ++i) {
        codes[i] = static_cast<std::uint8_t>(nearest_code((in[i].value - zero) * inverse, lowest, rules.levels));
      }
      continue;
    }
    for (std::size_t done = 0; done < block;) {  // a stream changes where the index crosses 2^32
      const Stream stream = make_stream(key, index + done);
      const auto low = static_cast<std::uint32_t>(index + done);
      const std::uint64_t left = 0x100000000ULL - low;
      const std::size_t run = left < block - done ? static_cast<std::size_t>(left) : block - done;
      for (std::size_t i = 0; i < run; ++i) {
        const float random = uniform(stream, low + static_cast<std::uint32_t>(i));
        const float t = (in[done + i].value - zero) * inverse;
        codes[done + i] = static_cast<std::uint8_t>(stochastic_code(t, lowest, rules.levels, random));
      }
      done += run;
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
    measure_ranges<Block>(rules, x, blocks, codec.block, at);
  }
  std::uint32_t worst = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    at.scale[b] = scale_of(rules, at.top[b]);
    at.inverse[b] = inverse_of(at.scale[b]);
    worst = at.top[b] > worst ? at.top[b] : worst;
  }
  store_fields(codec.scale, at.scale, blocks, fields);
  if (!codec.symmetric) store_fields(codec.scale, at.zero, blocks, zeros);
  if (codec.symmetric && !codec.stochastic) {
    codes_nearest<Block>(x, blocks, codec.block, at, codes);
  } else {
    codes_general(codec, rules, x, blocks, at, key, index, codes);
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

template <std::size_t Block>
inline void decode_integer(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n,
                           float* to) {
  const std::size_t block = Block ? Block : codec.block, blocks = layout.blocks(n);
  float scale[kMostBlocks], zero[kMostBlocks];
  load_fields(codec.scale, from, blocks, scale);
  if (!codec.symmetric) load_fields(codec.scale, from + layout.zeros_at(n), blocks, zero);
  const std::uint8_t* codes = from + layout.codes_at(n);
  auto* out = cells<float>(to);
  for (std::size_t b = 0; b < blocks; ++b, codes += block, out += block) {
    const std::size_t length = smaller(block, n - b * block);
    if (!codec.symmetric) {
      for (std::size_t i = 0; i < length; ++i) {
        out[i].value = zero[b] + static_cast<float>(static_cast<std::int32_t>(codes[i])) * scale[b];
      }
    } else if (length == block) {
      const auto* in = reinterpret_cast<const std::int8_t*>(codes);
      for (std::size_t i = 0; i < block; ++i) out[i].value = static_cast<float>(in[i]) * scale[b];
    } else {
      const auto* in = reinterpret_cast<const std::int8_t*>(codes);
      for (std::size_t i = 0; i < length; ++i) out[i].value = static_cast<float>(in[i]) * scale[b];
    }
  }
}

}  // namespace dtcomm::DTCOMM_ISA
