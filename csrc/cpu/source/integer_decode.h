// Decodes one granule of an integer codec, or adds it to floats.
#pragma once

#include <type_traits>

#include "codec/integer.h"
#include "codec/layout.h"
#include "cpu/source/bit_planes.h"
#include "cpu/source/blocks.h"
#include "cpu/source/cast.h"
#include "cpu/source/integer_simd.h"

namespace dtcomm::DTCOMM_ISA {

struct Fields {
  float scale[kMostBlocks];
  float zero[kMostBlocks];
};

// The scales and zero points of a granule's blocks. A block with one that is not finite decodes to the canonical NaN.
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

// Pointers into a granule's payload.
template <bool Symmetric>
struct Granule {
  Fields fields;
  const std::uint8_t* planes;
  std::size_t count;  // of stored codes
  unsigned shift;     // from an element to its block

  Granule(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n)
      : planes(from + layout.codes_at(n)),
        count(layout.blocks(n) * codec.block),
        shift(static_cast<unsigned>(__builtin_ctz(codec.block))) {
    load_fields<Symmetric>(codec, layout, from, n, fields);
  }

  // Element i alone.
  float one(unsigned bits, std::size_t i) const {
    const std::uint32_t code = load_code(planes, bits, count, i);
    const std::int32_t q = Symmetric ? signed_code(code, bits) : static_cast<std::int32_t>(code);
    return value(static_cast<float>(q), i >> shift);
  }

  // The value of code q of block b.
  template <class Q>
  __attribute__((always_inline)) auto value(Q q, std::size_t b) const {
    if constexpr (Symmetric) return q * fields.scale[b];
    return fields.zero[b] + q * fields.scale[b];
  }
};

#if defined(__AVX512F__)

// `Vectors` of them, at most two, from element i on.
template <std::size_t Vectors, bool Stream, unsigned Bits, class Lanes, class Finish>
inline __attribute__((always_inline)) void some_vectors(const Lanes& lanes, PlanePointers& planes, std::size_t i,
                                                        float* to, const Finish& finish) {
  PlanePointers at = planes;
#pragma GCC unroll 2
  for (std::size_t j = 0; j < Vectors * kLanes; j += kLanes, at.move(Bits, kLanes)) {
    store<Stream>(to + i + j, finish(reinterpret_cast<Floats>(lanes.at(at)), i + j));
  }
  planes.move(Bits, Vectors * kLanes);
}

// `Vectors` of them at a time, as long as they end at `end` or before.
template <std::size_t Vectors, bool Stream, unsigned Bits, class Lanes, class Finish>
inline __attribute__((always_inline)) void each_vector(const Lanes& lanes, PlanePointers& planes, std::size_t& i,
                                                       std::size_t end, float* to, const Finish& finish) {
  for (; i + Vectors * kLanes <= end; i += Vectors * kLanes) {
    some_vectors<Vectors, Stream, Bits>(lanes, planes, i, to, finish);
  }
}

// Whole vectors of the first n elements.
template <unsigned Bits, bool Symmetric, bool Stream, class Finish>
inline void each_vector(const Granule<Symmetric>& granule, const std::uint8_t* from, std::size_t n, float* to,
                        const Finish& finish) {
  const std::size_t whole = n / kLanes * kLanes, block = std::size_t{1} << granule.shift;
  PlanePointers planes(from, Bits, granule.count);
  const auto lanes_of = [&](std::size_t b) __attribute__((always_inline)) {
    return BlockLanes<Bits, Symmetric>(granule.fields.scale[b], Symmetric ? 0.0f : granule.fields.zero[b]);
  };
  std::size_t i = 0, b = 0;
  // The default block is two vectors: code without inner loops, whose branches would take much of the time.
  if (block == 2 * kLanes) {
    for (const std::size_t blocks = whole / block; b < blocks; ++b, i += 2 * kLanes) {
      some_vectors<2, Stream, Bits>(lanes_of(b), planes, i, to, finish);
    }
  }
  for (; i < whole; ++b) {
    const auto lanes = lanes_of(b);
    const std::size_t end = smaller(i + block, whole);
    each_vector<2, Stream, Bits>(lanes, planes, i, end, to, finish);
    each_vector<1, Stream, Bits>(lanes, planes, i, end, to, finish);
  }
}

// Calls run(std::integral_constant<unsigned, bits>).
template <class Run>
inline __attribute__((always_inline)) auto with_width(unsigned bits, const Run& run) {
  switch (bits) {
    case 2:
      return run(std::integral_constant<unsigned, 2>{});
    case 3:
      return run(std::integral_constant<unsigned, 3>{});
    case 4:
      return run(std::integral_constant<unsigned, 4>{});
    case 5:
      return run(std::integral_constant<unsigned, 5>{});
    case 6:
      return run(std::integral_constant<unsigned, 6>{});
    case 7:
      return run(std::integral_constant<unsigned, 7>{});
    default:
      return run(std::integral_constant<unsigned, 8>{});
  }
}

// Codes of these widths are made bytes first, a step at a time; the others go straight to the lanes of vectors.
constexpr bool through_bytes(unsigned bits) { return bits >= 5 && bits <= 7; }

// Calls run(p, vector p) with the numbers of a step's codes. Bytes below 128 become floats as parts of a mantissa,
// which takes neither a widening nor a conversion.
template <unsigned Bits, bool Symmetric, class Run>
inline __attribute__((always_inline)) void each_number(Step words, const Run& run) {
  // The large number's mantissa has a code's unit at bit `low`. The sign of a code is flipped, which adds kZero.
  constexpr float kZero = Symmetric ? static_cast<float>(1 << (Bits - 1)) : 0.0f;
  constexpr std::uint32_t kFlipped = Symmetric ? 1u << (Bits - 1) : 0;
  const auto number = [](__m512i word, int low, float large) __attribute__((always_inline)) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(((1u << Bits) - 1) << low));
    const __m512i above = _mm512_set1_epi32(static_cast<int>(bits_of(large) ^ kFlipped << low));
    const __m512i sum = _mm512_ternarylogic_epi32(word, mask, above, 0x6a);  // (1 & 2) ^ 3
    return reinterpret_cast<Floats>(sum) - (large + kZero);
  };
  run(0, number(words, 0, 0x1p23f));
  run(1, number(words, 8, 0x1p15f));
  run(2, number(words, 16, 0x1p7f));
  run(3, number(_mm512_maskz_srli_epi32(0xffff, words, 8), 16, 0x1p7f));
}

// Whole vectors (steps, for some widths) of the first n elements; returns how many elements.
template <bool Symmetric, bool Stream, class Finish>
inline std::size_t each_vector(unsigned bits, const Granule<Symmetric>& granule, std::size_t n, float* to,
                               const Finish& finish) {
  return with_width(bits, [&](auto width) {
    constexpr unsigned kBits = decltype(width)::value;
    if constexpr (through_bytes(kBits)) {
      const std::size_t whole = n / kStep * kStep;
      if (whole == 0) return whole;
      // A step's codes are loaded before the last step's numbers are made: the work on a step is a long chain, and
      // processors look at about two steps at once.
      Step next = load_words<kBits>(granule.planes, granule.count, 0);
      for (std::size_t i = 0; i < whole; i += kStep) {
        const Step words = next;
        next = load_words<kBits>(granule.planes, granule.count, smaller(i + kStep, whole - kStep));
        each_number<kBits, Symmetric>(words, [&](std::size_t p, Floats q) __attribute__((always_inline)) {
          const std::size_t j = i + p * kLanes;
          store<Stream>(to + j, finish(granule.value(q, j >> granule.shift), j));
        });
      }
      return whole;
    } else {
      each_vector<kBits, Symmetric, Stream>(granule, granule.planes, n, to, finish);
      return n / kLanes * kLanes;
    }
  });
}

#elif defined(DTCOMM_VECTORS)

// Lanes part * kLanes and on of a step's codes, as whole numbers.
#if defined(DTCOMM_NEON)
template <bool Symmetric>
inline __attribute__((always_inline)) Floats widen_codes(Step codes, std::size_t part) {
  if constexpr (Symmetric) {
    const int8x16_t raw = vreinterpretq_s8_u8(codes);
    const int16x8_t words = part < 2 ? vmovl_s8(vget_low_s8(raw)) : vmovl_high_s8(raw);
    return vcvtq_f32_s32(part % 2 ? vmovl_high_s16(words) : vmovl_s16(vget_low_s16(words)));
  } else {
    const uint16x8_t words = part < 2 ? vmovl_u8(vget_low_u8(codes)) : vmovl_high_u8(codes);
    return vcvtq_f32_u32(part % 2 ? vmovl_high_u16(words) : vmovl_u16(vget_low_u16(words)));
  }
}
#else
template <bool Symmetric>
inline __attribute__((always_inline)) Floats widen_codes(Step codes, std::size_t part) {
  const __m128i half = part < 2 ? _mm256_castsi256_si128(codes) : _mm256_extracti128_si256(codes, 1);
  const __m128i raw = part % 2 ? _mm_unpackhi_epi64(half, half) : half;
  const __m256i wide = Symmetric ? _mm256_cvtepi8_epi32(raw) : _mm256_cvtepu8_epi32(raw);
  return reinterpret_cast<Floats>(_mm256_cvtepi32_ps(wide));
}
#endif

// Whole steps of the first n elements; returns how many.
template <bool Symmetric, bool Stream, class Finish>
inline std::size_t each_vector(unsigned bits, const Granule<Symmetric>& granule, std::size_t n, float* to,
                               const Finish& finish) {
  const std::size_t whole = n / kStep * kStep;
#if defined(__AVX2__)
  using Code = Codes<std::conditional_t<Symmetric, std::int8_t, std::uint8_t>>;
  if (bits == 8) {
    for (std::size_t i = 0; i < whole; i += kLanes) {
      store<Stream>(to + i, finish(granule.value(Code::many(granule.planes, i), i >> granule.shift), i));
    }
    return whole;
  }
#endif
  for (std::size_t i = 0; i < whole; i += kStep) {
    Step codes = load_planes(granule.planes, bits, granule.count, i);
    if constexpr (Symmetric) codes = extend_sign(codes, bits);
#pragma GCC unroll 4
    for (std::size_t part = 0; part < kStep / kLanes; ++part) {
      const std::size_t j = i + part * kLanes;
      store<Stream>(to + j, finish(granule.value(widen_codes<Symmetric>(codes, part), j >> granule.shift), j));
    }
  }
  return whole;
}

#else

template <bool Symmetric, bool Stream, class Finish>
inline std::size_t each_vector(unsigned, const Granule<Symmetric>&, std::size_t, float*, const Finish&) {
  return 0;
}

#endif

// to[i] = finish(value of element i, i).
template <bool Symmetric, bool Stream, class Finish>
inline void each_value(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n, float* to,
                       const Finish& finish) {
  const Granule<Symmetric> granule(codec, layout, from, n);
  const unsigned bits = codec.bits;
  std::size_t i = each_vector<Symmetric, Stream>(bits, granule, n, to, finish);
  auto* out = unaligned<float>(to);
  for (; i < n; i += kSmallestBlock) {
    const std::uint64_t groups[2] = {load_group(granule.planes, bits, granule.count, i / kGroup),
                                     load_group(granule.planes, bits, granule.count, i / kGroup + 1)};
    std::uint8_t codes[kSmallestBlock];
    __builtin_memcpy(codes, groups, sizeof codes);
    float values[kSmallestBlock];
    for (std::size_t j = 0; j < kSmallestBlock; ++j) {
      const std::int32_t q = Symmetric ? signed_code(codes[j], bits) : static_cast<std::int32_t>(codes[j]);
      values[j] = granule.value(static_cast<float>(q), i >> granule.shift);
    }
    const std::size_t length = smaller(kSmallestBlock, n - i);
    for (std::size_t j = 0; j < length; ++j) out[i + j].value = finish(values[j], i + j);
  }
}

template <bool Stream, class Finish>
inline void each_value(const Codec& codec, const Layout& layout, const std::uint8_t* from, std::size_t n, float* to,
                       const Finish& finish) {
  if (codec.symmetric) {
    each_value<true, Stream>(codec, layout, from, n, to, finish);
  } else {
    each_value<false, Stream>(codec, layout, from, n, to, finish);
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
  each_value<false>(codec, layout, from, n, to, added_to(sum));
}

#if defined(__AVX512F__)
// Whether no value of the granule is Inf or NaN, so that sums of such values are not NaN.
template <bool Symmetric>
inline bool all_finite(const Granule<Symmetric>& granule, std::size_t n) {
  const std::size_t blocks = (n + (std::size_t{1} << granule.shift) - 1) >> granule.shift;
  std::uint32_t worst = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    float size = float_of(magnitude(granule.fields.scale[b])) * 256.0f;  // codes are at most 255
    if constexpr (!Symmetric) size = size + float_of(magnitude(granule.fields.zero[b]));
    worst = magnitude(size) > worst ? magnitude(size) : worst;
  }
  return worst < kInfinity32;
}

// Prefetches the part of the next granule that corresponds to 64 elements from element `i` on: processors follow a
// granule's planes less well than a single run of bytes. A prefetch beyond the payload does nothing.
template <unsigned Bits>
inline __attribute__((always_inline)) void prefetch_planes(const std::uint8_t* next, std::size_t i) {
  constexpr std::size_t kBitsAndScales = Bits + 1;
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(next) + i * kBitsAndScales / 8), 0,
                     3);
}

// to = the sum of two granules' floats; a streamed `to` is aligned to a line. Canonical: sums may be NaN. The payloads'
// next granules begin at `next`.
template <bool Symmetric, bool Stream, bool Canonical>
inline void add_granules(unsigned bits, const Granule<Symmetric>& a, const Granule<Symmetric>& b, std::size_t n,
                         float* to, const std::uint8_t* const (&next)[2]) {
  const auto put = [=](std::size_t i, Floats sum) __attribute__((always_inline)) {
    store<Stream>(to + i, Canonical ? with_canonical_nan(sum) : sum);
  };
  const std::size_t done = with_width(bits, [&](auto width) {
    constexpr unsigned kBits = decltype(width)::value;
    if constexpr (through_bytes(kBits)) {
      const std::size_t whole = n / kStep * kStep;
      for (std::size_t i = 0; i < whole; i += kStep) {
        prefetch_planes<kBits>(next[0], i);
        prefetch_planes<kBits>(next[1], i);
        Floats first[kStep / kLanes];
        const Step left = load_words<kBits>(a.planes, a.count, i), right = load_words<kBits>(b.planes, b.count, i);
        each_number<kBits, Symmetric>(left, [&](std::size_t p, Floats q) __attribute__((always_inline)) {
          first[p] = a.value(q, (i + p * kLanes) >> a.shift);
        });
        each_number<kBits, Symmetric>(right, [&](std::size_t p, Floats q) __attribute__((always_inline)) {
          const std::size_t j = i + p * kLanes;
          put(j, first[p] + b.value(q, j >> b.shift));
        });
      }
      return whole;
    } else {
      const std::size_t whole = n / kLanes * kLanes, block = std::size_t{1} << a.shift;
      PlanePointers left(a.planes, kBits, a.count), right(b.planes, kBits, b.count);
      for (std::size_t i = 0, at = 0; i < whole; ++at) {
        const BlockLanes<kBits, Symmetric> x(a.fields.scale[at], Symmetric ? 0.0f : a.fields.zero[at]);
        const BlockLanes<kBits, Symmetric> y(b.fields.scale[at], Symmetric ? 0.0f : b.fields.zero[at]);
        if constexpr (kBits == 3) {
          prefetch_planes<kBits>(next[0], i);
          prefetch_planes<kBits>(next[1], i);
        }
        for (const std::size_t end = smaller(i + block, whole); i < end; i += kLanes) {
          put(i, reinterpret_cast<Floats>(_mm512_add_ps(x.at(left), y.at(right))));
          left.move(kBits, kLanes);
          right.move(kBits, kLanes);
        }
      }
      return whole;
    }
  });
  auto* out = unaligned<float>(to);
  for (std::size_t i = done; i < n; ++i) out[i].value = with_canonical_nan(a.one(bits, i) + b.one(bits, i));
}

template <bool Symmetric, bool Stream>
inline void add_pair_integer(const Codec& codec, const Layout& layout, const std::uint8_t* first,
                             const std::uint8_t* second, std::size_t n, float* to) {
  const Granule<Symmetric> a(codec, layout, first, n), b(codec, layout, second, n);
  const std::size_t bytes = layout.bytes(n);
  const std::uint8_t* const next[2] = {first + bytes, second + bytes};
  if (all_finite(a, n) && all_finite(b, n))
    return add_granules<Symmetric, Stream, false>(codec.bits, a, b, n, to, next);
  add_granules<Symmetric, Stream, true>(codec.bits, a, b, n, to, next);
}
#endif

}  // namespace dtcomm::DTCOMM_ISA
