// Encodes one granule with an integer codec, in L1: magnitudes, then all scales at once, then the codes.
#pragma once

#include "codec/integer.h"
#include "codec/layout.h"
#include "cpu/source/blocks.h"
#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"
#include "cpu/source/integer_decode.h"

namespace dtcomm::DTCOMM_ISA {

// Floats as integers in the same order, and back; -0 comes before +0.
inline std::int32_t order_of(float value) {
  const auto bits = static_cast<std::int32_t>(bits_of(value));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float from_order(std::int32_t order) {
  return float_of(static_cast<std::uint32_t>(order ^ ((order >> 31) & 0x7fffffff)));
}

// The zero points, and `top` becomes the block's range above its zero point.
inline void measure_ranges(const IntegerRules& rules, const float* x, std::size_t n, std::size_t block, Blocks& at) {
  const auto* in = unaligned<float>(x);
  for (std::size_t b = 0; b * block < n; ++b, in += block) {
    const std::size_t length = smaller(block, n - b * block);
    // The place of NaN in this order does not matter: its block is known to be NaN.
    std::int32_t low = order_of(in[0].value), high = low;
    for (std::size_t i = 0; i < length; ++i) {
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

// The parameters of turning elements into codes.
struct Rounding {
  IntegerRules rules;
  Stream stream;           // of the granule's elements, where `one_stream`
  std::uint64_t key;       // stochastic
  std::uint64_t index;     // of the granule's first element
  bool one_stream;         // the index does not pass a multiple of 2^32 within the granule
  const EncodeArgs& next;  // what is encoded after this granule
};

template <bool Symmetric, bool Stochastic>
inline __attribute__((always_inline)) std::int32_t code_of(const Rounding& args, float value, float zero, float inverse,
                                                           float random) {
  const float t = (value - zero) * inverse, levels = args.rules.levels;
  if constexpr (Stochastic) return stochastic_code(t, Symmetric ? -levels : 0.0f, levels, random);
  return nearest_code(t, Symmetric ? -levels : 0.0f, levels);
}

#if defined(__AVX512F__)
// Codes of 16 elements as integers; `lane` is 0..15.
template <bool Symmetric, bool Stochastic>
inline __attribute__((always_inline)) __m512i codes_of(const Rounding& args, const float* x, float zero, float inverse,
                                                       std::uint32_t index) {
  __m512 t = _mm512_loadu_ps(x);
  if constexpr (!Symmetric) t = _mm512_sub_ps(t, _mm512_set1_ps(zero));
  t = _mm512_mul_ps(t, _mm512_set1_ps(inverse));
  if constexpr (Stochastic || !Symmetric) {
    t = _mm512_maskz_max_ps(0xffff, t, _mm512_set1_ps(Symmetric ? -args.rules.levels : 0.0f));
    t = _mm512_maskz_min_ps(0xffff, t, _mm512_set1_ps(args.rules.levels));
  }
  // Symmetric codes to nearest need no clamp: a scale is at most a half unit of bf16 below top / levels
  // (docs/reference/wire-format.md).
  if constexpr (!Stochastic) return _mm512_maskz_cvtps_epi32(0xffff, t);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i h = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(index)), lane);
  h = _mm512_xor_si512(h, _mm512_set1_epi32(static_cast<int>(args.stream.before)));
  const auto xorshift_right = [](__m512i v, unsigned by) {
    return _mm512_xor_si512(v, _mm512_maskz_srl_epi32(0xffff, v, _mm_cvtsi32_si128(static_cast<int>(by))));
  };
  h = _mm512_mullo_epi32(xorshift_right(h, 16), _mm512_set1_epi32(0x7feb352d));
  h = _mm512_add_epi32(h, _mm512_set1_epi32(static_cast<int>(args.stream.between)));
  h = _mm512_mullo_epi32(xorshift_right(h, 15), _mm512_set1_epi32(static_cast<int>(0x846ca68bU)));
  h = _mm512_maskz_srli_epi32(0xffff, xorshift_right(h, 16), 8);
  const __m512 random = _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xffff, h), _mm512_set1_ps(0x1p-24f));
  const __m512 floor = _mm512_maskz_roundscale_ps(0xffff, t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __mmask16 up = _mm512_cmp_ps_mask(random, _mm512_sub_ps(t, floor), _CMP_LT_OQ);
  const __m512i code = _mm512_maskz_cvtps_epi32(0xffff, floor);
  return _mm512_mask_add_epi32(code, up, code, _mm512_set1_epi32(1));
}
#elif defined(__AVX2__)
// Codes of 8 elements as integers.
template <bool Symmetric, bool Stochastic>
inline __attribute__((always_inline)) __m256i codes_of(const Rounding& args, const float* x, float zero, float inverse,
                                                       std::uint32_t index) {
  __m256 t = _mm256_loadu_ps(x);
  if constexpr (!Symmetric) t = _mm256_sub_ps(t, _mm256_set1_ps(zero));
  t = _mm256_mul_ps(t, _mm256_set1_ps(inverse));
  if constexpr (Stochastic || !Symmetric) {
    t = _mm256_max_ps(t, _mm256_set1_ps(Symmetric ? -args.rules.levels : 0.0f));
    t = _mm256_min_ps(t, _mm256_set1_ps(args.rules.levels));
  }
  // Symmetric codes to nearest need no clamp: a scale is at most a half unit of bf16 below top / levels
  // (docs/reference/wire-format.md).
  if constexpr (!Stochastic) return _mm256_cvtps_epi32(t);
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i h = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(index)), lane);
  h = _mm256_xor_si256(h, _mm256_set1_epi32(static_cast<int>(args.stream.before)));
  const auto xorshift_right = [](__m256i v, int by) {
    return _mm256_xor_si256(v, _mm256_srl_epi32(v, _mm_cvtsi32_si128(by)));
  };
  h = _mm256_mullo_epi32(xorshift_right(h, 16), _mm256_set1_epi32(0x7feb352d));
  h = _mm256_add_epi32(h, _mm256_set1_epi32(static_cast<int>(args.stream.between)));
  h = _mm256_mullo_epi32(xorshift_right(h, 15), _mm256_set1_epi32(static_cast<int>(0x846ca68bU)));
  h = _mm256_srli_epi32(xorshift_right(h, 16), 8);
  const __m256 random = _mm256_mul_ps(_mm256_cvtepi32_ps(h), _mm256_set1_ps(0x1p-24f));
  const __m256 floor = _mm256_floor_ps(t);
  const __m256 up = _mm256_cmp_ps(random, _mm256_sub_ps(t, floor), _CMP_LT_OQ);
  return _mm256_sub_epi32(_mm256_cvtps_epi32(floor), _mm256_castps_si256(up));
}
#elif defined(DTCOMM_NEON)
// Codes of 4 elements as integers.
template <bool Symmetric, bool Stochastic>
inline __attribute__((always_inline)) int32x4_t codes_of(const Rounding& args, const float* x, float zero,
                                                         float inverse, std::uint32_t index) {
  float32x4_t t = load(x);
  if constexpr (!Symmetric) t = vsubq_f32(t, vdupq_n_f32(zero));
  t = vmulq_n_f32(t, inverse);
  if constexpr (Stochastic || !Symmetric) {
    t = vmaxq_f32(t, vdupq_n_f32(Symmetric ? -args.rules.levels : 0.0f));
    t = vminq_f32(t, vdupq_n_f32(args.rules.levels));
  }
  // Symmetric codes to nearest need no clamp: a scale is at most a half unit of bf16 below top / levels
  // (docs/reference/wire-format.md).
  if constexpr (!Stochastic) return vcvtnq_s32_f32(t);
  constexpr std::uint32_t kFirst[4] = {0, 1, 2, 3};
  uint32x4_t h = vaddq_u32(vdupq_n_u32(index), vld1q_u32(kFirst));
  h = veorq_u32(h, vdupq_n_u32(args.stream.before));
  h = vmulq_u32(veorq_u32(h, vshrq_n_u32(h, 16)), vdupq_n_u32(0x7feb352d));
  h = vaddq_u32(h, vdupq_n_u32(args.stream.between));
  h = vmulq_u32(veorq_u32(h, vshrq_n_u32(h, 15)), vdupq_n_u32(0x846ca68b));
  h = vshrq_n_u32(veorq_u32(h, vshrq_n_u32(h, 16)), 8);
  const float32x4_t random = vmulq_n_f32(vcvtq_f32_u32(h), 0x1p-24f);
  const float32x4_t floor = vrndmq_f32(t);
  const uint32x4_t up = vcltq_f32(random, vsubq_f32(t, floor));
  return vsubq_s32(vcvtq_s32_f32(floor), vreinterpretq_s32_u32(up));
}
#endif

#if defined(DTCOMM_VECTORS)
// A step's codes, from elements i on, as bytes.
template <bool Symmetric, bool Stochastic>
inline __attribute__((always_inline)) Step step_codes(const Rounding& args, const float* x, std::size_t i,
                                                      unsigned shift, const Blocks& at) {
  const auto part = [&](std::size_t p) __attribute__((always_inline)) {
    const std::size_t j = i + p * kLanes, b = j >> shift;
    return codes_of<Symmetric, Stochastic>(args, x + j, at.zero[b], at.inverse[b],
                                           static_cast<std::uint32_t>(args.index + j));
  };
  // The packs work within quarters (halves) of the vectors: put the groups of four back in order.
#if defined(__AVX512F__)
  const __m512i words[2] = {_mm512_packs_epi32(part(0), part(1)), _mm512_packs_epi32(part(2), part(3))};
  const __m512i bytes = Symmetric ? _mm512_packs_epi16(words[0], words[1]) : _mm512_packus_epi16(words[0], words[1]);
  return _mm512_maskz_permutexvar_epi32(0xffff, _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                        bytes);
#elif defined(DTCOMM_NEON)
  const int16x8_t low = vqmovn_high_s32(vqmovn_s32(part(0)), part(1));
  const int16x8_t high = vqmovn_high_s32(vqmovn_s32(part(2)), part(3));
  if constexpr (Symmetric) return vreinterpretq_u8_s8(vqmovn_high_s16(vqmovn_s16(low), high));
  return vqmovun_high_s16(vqmovun_s16(low), high);
#else
  const __m256i words[2] = {_mm256_packs_epi32(part(0), part(1)), _mm256_packs_epi32(part(2), part(3))};
  const __m256i bytes = Symmetric ? _mm256_packs_epi16(words[0], words[1]) : _mm256_packus_epi16(words[0], words[1]);
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
}
#endif

// The codes of `n` elements, missing ones of the last block included.
template <bool Symmetric, bool Stochastic>
inline void encode_codes(const Codec& codec, const Rounding& args, const float* x, std::size_t n, std::size_t count,
                         const Blocks& at, std::uint8_t* planes) {
  const unsigned bits = codec.bits, shift = static_cast<unsigned>(__builtin_ctz(codec.block));
  std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
  if (!Stochastic || args.one_stream) {
    for (; i + kStep <= n; i += kStep) {
      if (i % 64 == 0) prefetch_next(args.next, i);
      store_planes(step_codes<Symmetric, Stochastic>(args, x, i, shift, at), bits, count, i, planes);
    }
  }
#endif
  for (; i < count; i += kSmallestBlock) {
    const std::size_t length = i < n ? smaller(kSmallestBlock, n - i) : 0;
    const float zero = at.zero[i >> shift], inverse = at.inverse[i >> shift];
    float values[kSmallestBlock] = {}, random[kSmallestBlock] = {};
    __builtin_memcpy(values, x + smaller(i, n), length * sizeof(float));
    if constexpr (Stochastic) {
      const std::uint64_t first = args.index + i;
      const auto low = static_cast<std::uint32_t>(first);
      if (args.one_stream) {
        for (std::uint32_t j = 0; j < kSmallestBlock; ++j) random[j] = uniform(args.stream, low + j);
      } else {
        for (std::uint32_t j = 0; j < kSmallestBlock; ++j) {
          random[j] = uniform(make_stream(args.key, first + j), low + j);
        }
      }
    }
    std::int32_t made[kSmallestBlock];
    for (std::size_t j = 0; j < kSmallestBlock; ++j) {
      made[j] = code_of<Symmetric, Stochastic>(args, values[j], zero, inverse, random[j]);
    }
    std::uint8_t codes[kSmallestBlock];
    for (std::size_t j = 0; j < kSmallestBlock; ++j) {
      codes[j] = static_cast<std::uint8_t>(j < length ? made[j] : 0);
    }
    std::uint64_t groups[2];
    __builtin_memcpy(groups, codes, sizeof groups);
    store_group(groups[0], bits, count, i / kGroup, planes);
    store_group(groups[1], bits, count, i / kGroup + 1, planes);
  }
}

template <std::size_t Block>
inline void encode_integer(const Codec& codec, const IntegerRules& rules, const Layout& layout, const float* x,
                           std::size_t n, const EncodeArgs& encoding, std::uint8_t* to) {
  const std::uint64_t key = encoding.key, index = encoding.index;
  const std::size_t blocks = layout.blocks(n), count = blocks * codec.block;
  Blocks at;
  const std::size_t whole = n >> layout.block_shift;
  measure<Block>(x, whole, codec.block, at);
  if (whole < blocks) at.top[whole] = largest(x + whole * codec.block, n - whole * codec.block);
  if (codec.symmetric) {
    __builtin_memset(at.zero, 0, sizeof at.zero);
  } else {
    measure_ranges(rules, x, n, codec.block, at);
  }
  std::uint32_t worst = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    at.scale[b] = scale_of(rules, at.top[b]);
    worst = at.top[b] > worst ? at.top[b] : worst;
  }
  for (std::size_t b = 0; b < blocks; ++b) at.inverse[b] = inverse_of(at.scale[b]);
  store_fields(codec.scale, at.scale, blocks, to);
  if (!codec.symmetric) store_fields(codec.scale, at.zero, blocks, to + layout.zeros_at(n));

  std::uint8_t* planes = to + layout.codes_at(n);
  const bool one_stream = index >> 32 == (index + count) >> 32;
  const Rounding args{rules, codec.stochastic ? make_stream(key, index) : Stream{}, key, index, one_stream, encoding};
  const auto codes = !codec.stochastic ? codec.symmetric ? encode_codes<true, false> : encode_codes<false, false>
                     : codec.symmetric ? encode_codes<true, true>
                                       : encode_codes<false, true>;
  codes(codec, args, x, n, count, at, planes);
  if (worst >= kInfinity32) {  // the codes of blocks with Inf or NaN are not zeros yet
    for (std::size_t b = 0; b < blocks; ++b) {
      if (at.top[b] >= kInfinity32) clear_codes(codec.bits, count, b * codec.block, codec.block, planes);
    }
  }
  __builtin_memset(to + layout.used(n), 0, layout.bytes(n) - layout.used(n));
}

}  // namespace dtcomm::DTCOMM_ISA
