// One granule of an integer codec into floats, or onto a sum of floats.
#pragma once

#include <type_traits>

#include "codec/integer.h"
#include "codec/layout.h"
#include "cpu/source/blocks.h"
#include "cpu/source/cast.h"
#include "cpu/source/planes.h"

namespace dtcomm::DTCOMM_ISA {

struct Fields {
  float scale[kMostBlocks];
  float zero[kMostBlocks];
};

// The fields of a granule's blocks, so that what comes out of a block with a field that is no number is the one NaN.
template <bool Symmetric>
inline void load_fields(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n,
                        Fields& fields) {
  const std::size_t blocks = layout.blocks(n);
  load_fields(codec.scale, from, blocks, fields.scale);
  if constexpr (!Symmetric) load_fields(codec.scale, from + layout.zeros_at(n), blocks, fields.zero);
  for (std::size_t b = 0; b < blocks; ++b) {
    std::uint32_t worst = magnitude(fields.scale[b]);
    if constexpr (!Symmetric) {
      const std::uint32_t other = magnitude(fields.zero[b]);
      worst = other > worst ? other : worst;
      fields.zero[b] = float_of(worst >= kInfinity32 ? 0 : bits_of(fields.zero[b]));
    }
    fields.scale[b] = float_of(worst >= kInfinity32 ? kNaN32 : bits_of(fields.scale[b]));
  }
}

#if defined(__AVX2__)
// Lanes part * kLanes and on of a step's codes, as whole numbers.
template <bool Symmetric>
inline __attribute__((always_inline)) Floats widen_codes(Step codes, std::size_t part) {
#if defined(__AVX512F__)
  const __m128i raw = part == 0   ? _mm512_maskz_extracti32x4_epi32(0xf, codes, 0)
                      : part == 1 ? _mm512_maskz_extracti32x4_epi32(0xf, codes, 1)
                      : part == 2 ? _mm512_maskz_extracti32x4_epi32(0xf, codes, 2)
                                  : _mm512_maskz_extracti32x4_epi32(0xf, codes, 3);
  const __m512i wide = Symmetric ? _mm512_maskz_cvtepi8_epi32(0xffff, raw) : _mm512_maskz_cvtepu8_epi32(0xffff, raw);
  return reinterpret_cast<Floats>(_mm512_maskz_cvtepi32_ps(0xffff, wide));
#else
  const __m128i half = part < 2 ? _mm256_castsi256_si128(codes) : _mm256_extracti128_si256(codes, 1);
  const __m128i raw = part % 2 ? _mm_unpackhi_epi64(half, half) : half;
  const __m256i wide = Symmetric ? _mm256_cvtepi8_epi32(raw) : _mm256_cvtepu8_epi32(raw);
  return reinterpret_cast<Floats>(_mm256_cvtepi32_ps(wide));
#endif
}
#endif

// to[i] = finish(value of element i, i).
template <bool Symmetric, bool Whole, bool Stream, class Finish>
inline void each_value(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n, float* to,
                       const Finish& finish) {
  Fields fields;
  load_fields<Symmetric>(codec, layout, from, n, fields);
  const unsigned bits = Whole ? 8 : codec.bits, shift = static_cast<unsigned>(__builtin_ctz(codec.block));
  const std::size_t count = layout.blocks(n) * codec.block;
  const std::uint8_t* planes = from + layout.codes_at(n);
  const auto value = [&](auto q, std::size_t b, std::size_t i) __attribute__((always_inline)) {
    if constexpr (Symmetric) return finish(q * fields.scale[b], i);
    return finish(fields.zero[b] + q * fields.scale[b], i);
  };
  std::size_t i = 0;
#if defined(__AVX2__)
  for (; i + kStep <= n; i += kStep) {
    if constexpr (Whole) {
      using Code = Codes<std::conditional_t<Symmetric, std::int8_t, std::uint8_t>>;
#pragma GCC unroll 4
      for (std::size_t j = i; j < i + kStep; j += kLanes)
        store<Stream>(to + j, value(Code::many(planes, j), j >> shift, j));
    } else {
      Step codes = load_planes(planes, bits, count, i);
      if constexpr (Symmetric) codes = extend_sign(codes, bits);
#pragma GCC unroll 4
      for (std::size_t part = 0; part < kStep / kLanes; ++part) {
        const std::size_t j = i + part * kLanes;
        store<Stream>(to + j, value(widen_codes<Symmetric>(codes, part), j >> shift, j));
      }
    }
  }
#endif
  auto* out = cells<float>(to);
  for (; i < n; i += kSmallestBlock) {
    const std::uint64_t groups[2] = {load_group(planes, bits, count, i / kGroup),
                                     load_group(planes, bits, count, i / kGroup + 1)};
    std::uint8_t codes[kSmallestBlock];
    __builtin_memcpy(codes, groups, sizeof codes);
    float values[kSmallestBlock];
    for (std::size_t j = 0; j < kSmallestBlock; ++j) {
      const std::int32_t q = Symmetric ? signed_code(codes[j], bits) : static_cast<std::int32_t>(codes[j]);
      values[j] = static_cast<float>(q);
    }
    const std::size_t length = smaller(kSmallestBlock, n - i);
    for (std::size_t j = 0; j < length; ++j) out[i + j].value = value(values[j], i >> shift, i + j);
  }
}

template <bool Stream, class Finish>
inline void each_value(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n, float* to,
                       const Finish& finish) {
  if (codec.symmetric) {
    codec.bits == 8 ? each_value<true, true, Stream>(codec, layout, from, n, to, finish)
                    : each_value<true, false, Stream>(codec, layout, from, n, to, finish);
  } else {
    codec.bits == 8 ? each_value<false, true, Stream>(codec, layout, from, n, to, finish)
                    : each_value<false, false, Stream>(codec, layout, from, n, to, finish);
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
