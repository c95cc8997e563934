// One granule of an integer codec into floats, or onto a sum of floats.
#pragma once

#include "codec/integer.h"
#include "codec/layout.h"
#include "cpu/source/cast.h"

namespace dtcomm::DTCOMM_ISA {

constexpr std::size_t kMostBlocks = kGranule / kSmallestBlock;

inline void load_fields(Scale type, const std::uint8_t* from, std::size_t blocks, float* values) {
  if (type == Scale::fp32) {
    __builtin_memcpy(values, from, blocks * sizeof(float));
    return;
  }
  const auto* in = cells<std::uint16_t>(from);
  for (std::size_t b = 0; b < blocks; ++b) values[b] = float_from_bf16(in[b].value);
}

// to[i] = finish(value of element i, i). Block is the block's length where that is known to the compiler, else 0.
template <std::size_t Block, class Byte, bool Stream, class Finish>
inline void each_value(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n, float* to,
                       const Finish& finish) {
  const std::size_t block = Block ? Block : codec.block, blocks = layout.blocks(n);
  float scales[kMostBlocks], zeros[kMostBlocks];
  load_fields(codec.scale, from, blocks, scales);
  if constexpr (!Codes<Byte>::kSigned) load_fields(codec.scale, from + layout.zeros_at(n), blocks, zeros);
  const std::uint8_t* codes = from + layout.codes_at(n);
  const auto decode_block = [&](std::size_t b, std::size_t length) {
    const std::size_t at = b * block;
    const float scale = scales[b];
    if constexpr (Codes<Byte>::kSigned) {
      each<Codes<Byte>, Stream>(codes + at, length, to + at,
                                [&](auto q, std::size_t i) { return finish(q * scale, at + i); });
    } else {
      const float zero = zeros[b];
      each<Codes<Byte>, Stream>(codes + at, length, to + at,
                                [&](auto q, std::size_t i) { return finish(zero + q * scale, at + i); });
    }
  };
  const std::size_t whole = n / block;
  for (std::size_t b = 0; b < whole; ++b) decode_block(b, block);
  if (whole < blocks) decode_block(whole, n - whole * block);
}

template <bool Stream, class Finish>
inline void each_value(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n, float* to,
                       const Finish& finish) {
  if (!codec.symmetric) {
    each_value<0, std::uint8_t, Stream>(codec, layout, from, n, to, finish);
  } else if (codec.block == 32) {
    each_value<32, std::int8_t, Stream>(codec, layout, from, n, to, finish);
  } else {
    each_value<0, std::int8_t, Stream>(codec, layout, from, n, to, finish);
  }
}

// A streamed `to` is aligned to a line.
template <bool Stream>
inline void decode_integer(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n,
                           float* to) {
  each_value<Stream>(codec, layout, from, n, to, [](auto value, std::size_t) { return value; });
}

// to = sum + the granule's floats; `to` may be `sum`.
inline void add_integer(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n,
                        const float* sum, float* to) {
  const Run run{sum};
  each_value<false>(codec, layout, from, n, to,
                    [run](auto value, std::size_t i) { return settled(run.at(value, i) + value); });
}

}  // namespace dtcomm::DTCOMM_ISA
