// Encodes one granule with an integer codec, in L1: magnitudes, then all scales at once, then the codes.
#pragma once

#include "codec/integer.h"
#include "codec/layout.h"
#include "codec/outliers.h"
#include "cpu/source/blocks.h"
#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"
#include "cpu/source/integer_decode.h"
#include "cpu/source/step_randoms.h"

namespace dtcomm::DTCOMM_ISA {

// The zero points, and `top` becomes the block's range above its zero point.
inline void measure_ranges(const IntegerRules& rules, const float* x, std::size_t n, std::size_t block, Blocks& at) {
  Ranges ranges;
  measure_orders(x, n, block, ranges);
  for (std::size_t i = 0; i * block < n; ++i) {
    const bool bad = ranges.least[i] <= kLowestOrder || ranges.most[i] >= kHighestOrder;
    const float zero = zero_of(rules, float_from_order(ranges.least[i]));
    const std::uint32_t range = magnitude(float_from_order(ranges.most[i]) - zero);
    at.top[i] = bad ? kInfinity32 : range;
    at.zero[i] = bad || range >= kInfinity32 ? 0.0f : zero;
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
typedef __m512i Whole;  // integers of 32 bits

inline __attribute__((always_inline)) Whole to_nearest(Floats t) {
  return _mm512_maskz_cvtps_epi32(0xffff, reinterpret_cast<__m512>(t));
}

// Codes of 16 elements as integers. Symmetric codes to nearest need no clamp: a scale is at most a half unit of bf16
// below top / levels (docs/reference/wire-format.md). Others are clamped if Clamp is set; else the caller clamps the
// bytes that they are packed to, which is as good, as packing saturates.
template <bool Symmetric, bool Stochastic, bool Clamp>
inline __attribute__((always_inline)) Whole codes_of(const Rounding& args, Floats x, float zero, float inverse,
                                                     [[maybe_unused]] Floats random) {
  auto t = reinterpret_cast<__m512>((Symmetric ? x : x - zero) * inverse);
  if constexpr (Clamp && (Stochastic || !Symmetric)) {
    t = _mm512_maskz_max_ps(0xffff, t, _mm512_set1_ps(Symmetric ? -args.rules.levels : 0.0f));
    t = _mm512_maskz_min_ps(0xffff, t, _mm512_set1_ps(args.rules.levels));
  }
  if constexpr (!Stochastic) return to_nearest(reinterpret_cast<Floats>(t));
  constexpr int kFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const __m512 above = _mm512_maskz_reduce_ps(0xffff, t, kFloor);  // t minus its floor
  const __mmask16 up = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(random), above, _CMP_LT_OQ);
  const __m512i code = _mm512_maskz_cvt_roundps_epi32(0xffff, t, kFloor);
  return _mm512_mask_add_epi32(code, up, code, _mm512_set1_epi32(1));
}

inline __attribute__((always_inline)) Floats floats_of_codes(Whole codes) {
  return reinterpret_cast<Floats>(_mm512_maskz_cvtepi32_ps(0xffff, codes));
}
#elif defined(__AVX2__)
typedef __m256i Whole;

inline __attribute__((always_inline)) Whole to_nearest(Floats t) {
  return _mm256_cvtps_epi32(reinterpret_cast<__m256>(t));
}

// The same for 8 elements.
template <bool Symmetric, bool Stochastic, bool Clamp>
inline __attribute__((always_inline)) Whole codes_of(const Rounding& args, Floats x, float zero, float inverse,
                                                     [[maybe_unused]] Floats random) {
  auto t = reinterpret_cast<__m256>((Symmetric ? x : x - zero) * inverse);
  if constexpr (Clamp && (Stochastic || !Symmetric)) {
    t = _mm256_max_ps(t, _mm256_set1_ps(Symmetric ? -args.rules.levels : 0.0f));
    t = _mm256_min_ps(t, _mm256_set1_ps(args.rules.levels));
  }
  if constexpr (!Stochastic) return to_nearest(reinterpret_cast<Floats>(t));
  const __m256 floor = _mm256_floor_ps(t);
  const __m256 up = _mm256_cmp_ps(reinterpret_cast<__m256>(random), _mm256_sub_ps(t, floor), _CMP_LT_OQ);
  return _mm256_sub_epi32(_mm256_cvtps_epi32(floor), _mm256_castps_si256(up));
}

inline __attribute__((always_inline)) Floats floats_of_codes(Whole codes) {
  return reinterpret_cast<Floats>(_mm256_cvtepi32_ps(codes));
}
#elif defined(DTCOMM_NEON)
typedef int32x4_t Whole;

inline __attribute__((always_inline)) Whole to_nearest(Floats t) { return vcvtnq_s32_f32(t); }

// The same for 4 elements.
template <bool Symmetric, bool Stochastic, bool Clamp>
inline __attribute__((always_inline)) Whole codes_of(const Rounding& args, Floats x, float zero, float inverse,
                                                     [[maybe_unused]] Floats random) {
  float32x4_t t = (Symmetric ? x : x - zero) * inverse;
  if constexpr (Clamp && (Stochastic || !Symmetric)) {
    t = vmaxq_f32(t, vdupq_n_f32(Symmetric ? -args.rules.levels : 0.0f));
    t = vminq_f32(t, vdupq_n_f32(args.rules.levels));
  }
  if constexpr (!Stochastic) return to_nearest(t);
  const float32x4_t floor = vrndmq_f32(t);
  const uint32x4_t up = vcltq_f32(random, vsubq_f32(t, floor));
  return vsubq_s32(vcvtq_s32_f32(floor), vreinterpretq_s32_u32(up));
}

inline __attribute__((always_inline)) Floats floats_of_codes(Whole codes) { return vcvtq_f32_s32(codes); }
#endif

#if defined(DTCOMM_VECTORS)
// Codes as bytes, clamped to the limits that codes_of left out.
template <bool Symmetric, bool Stochastic>
inline __attribute__((always_inline)) Step clamped_codes(Step codes, float levels) {
  if constexpr (Symmetric && !Stochastic) return codes;
  const auto most = static_cast<std::int8_t>(static_cast<int>(levels));
#if defined(__AVX512F__)
  if constexpr (!Symmetric) return _mm512_maskz_min_epu8(~std::uint64_t{0}, codes, _mm512_set1_epi8(most));
  codes = _mm512_maskz_max_epi8(~std::uint64_t{0}, codes, _mm512_set1_epi8(static_cast<char>(-most)));
  return _mm512_maskz_min_epi8(~std::uint64_t{0}, codes, _mm512_set1_epi8(most));
#elif defined(__AVX2__)
  if constexpr (!Symmetric) return _mm256_min_epu8(codes, _mm256_set1_epi8(most));
  codes = _mm256_max_epi8(codes, _mm256_set1_epi8(static_cast<char>(-most)));
  return _mm256_min_epi8(codes, _mm256_set1_epi8(most));
#else
  if constexpr (!Symmetric) return vminq_u8(codes, vdupq_n_u8(static_cast<std::uint8_t>(most)));
  const int8x16_t above = vmaxq_s8(vreinterpretq_s8_u8(codes), vdupq_n_s8(static_cast<std::int8_t>(-most)));
  return vreinterpretq_u8_s8(vminq_s8(above, vdupq_n_s8(most)));
#endif
}

// The integers part(0) to part(3), each of a vector, as saturated bytes, signed or unsigned. The packs work within
// quarters (halves) of the vectors, which puts groups of four out of order.
template <bool Signed, class Part>
inline __attribute__((always_inline)) Step packed_step(const Part& part) {
#if defined(__AVX512F__)
  const __m512i words[2] = {_mm512_packs_epi32(part(0), part(1)), _mm512_packs_epi32(part(2), part(3))};
  const __m512i bytes = Signed ? _mm512_packs_epi16(words[0], words[1]) : _mm512_packus_epi16(words[0], words[1]);
  return _mm512_maskz_permutexvar_epi32(0xffff, _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                        bytes);
#elif defined(DTCOMM_NEON)
  const int16x8_t low = vqmovn_high_s32(vqmovn_s32(part(0)), part(1));
  const int16x8_t high = vqmovn_high_s32(vqmovn_s32(part(2)), part(3));
  return Signed ? vreinterpretq_u8_s8(vqmovn_high_s16(vqmovn_s16(low), high))
                : vqmovun_high_s16(vqmovun_s16(low), high);
#else
  const __m256i words[2] = {_mm256_packs_epi32(part(0), part(1)), _mm256_packs_epi32(part(2), part(3))};
  const __m256i bytes = Signed ? _mm256_packs_epi16(words[0], words[1]) : _mm256_packus_epi16(words[0], words[1]);
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
}

// A step's codes, from elements i on, as bytes; the error of the encoding goes to `error`. Block is the block length,
// or 0 if it is known at run time only, as 1 << shift.
template <bool Symmetric, bool Stochastic, Feedback Kind, std::size_t Block>
inline __attribute__((always_inline)) Step step_codes(const Rounding& args, const float* x, std::size_t i,
                                                      unsigned shift, const Blocks& at, const StepRandoms& randoms,
                                                      const ErrorTarget& error) {
  const auto part = [&](std::size_t p) __attribute__((always_inline)) {
    const std::size_t j = i + p * kLanes, b = Block ? i / Block + p * kLanes / Block : j >> shift;
    const Floats value = load(x + j), random = Stochastic ? randoms.part(p) : Floats{};
    const Whole codes =
        codes_of<Symmetric, Stochastic, Kind != Feedback::none>(args, value, at.zero[b], at.inverse[b], random);
    if constexpr (Kind != Feedback::none) {
      const Floats product = floats_of_codes(codes) * at.scale[b], decoded = Symmetric ? product : at.zero[b] + product;
      const Floats lost = (value - decoded) * error.divisor;
      store<false>(error.residual + j, Kind == Feedback::finite ? lost : finite_or(lost, load(error.old + j)));
    }
    return codes;
  };
  const Step ordered = packed_step<Symmetric>(part);
  if constexpr (Kind != Feedback::none) return ordered;
  return clamped_codes<Symmetric, Stochastic>(ordered, args.rules.levels);
}
#endif

// The codes of `n` elements, missing ones of the last block included.
template <bool Symmetric, bool Stochastic, Feedback Kind>
inline void encode_codes(const Codec& codec, const Rounding& args, const float* x, std::size_t n, std::size_t count,
                         const Blocks& at, std::uint8_t* planes, const ErrorTarget& error) {
  const unsigned bits = codec.bits, shift = static_cast<unsigned>(__builtin_ctz(codec.block));
  std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
  if (!Stochastic || args.one_stream) {
    StepRandoms randoms(args.stream);
    const auto whole_steps = [&](auto block) __attribute__((always_inline)) {
      for (; i + kStep <= n; i += kStep) {
        if (i % 64 == 0) prefetch_next(args.next, i);
        if constexpr (Stochastic) randoms.start(static_cast<std::uint32_t>(args.index + i));
        constexpr std::size_t kBlock = decltype(block)::value;
        const Step codes = step_codes<Symmetric, Stochastic, Kind, kBlock>(args, x, i, shift, at, randoms, error);
        store_planes(codes, bits, count, i, planes);
      }
    };
    if (Symmetric && !Stochastic && codec.block == 32) {  // the default, whose scales then are loaded once a block
      whole_steps(std::integral_constant<std::size_t, 32>{});
    } else {
      whole_steps(std::integral_constant<std::size_t, 0>{});
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
    if constexpr (Kind != Feedback::none) {
      const float scale = at.scale[i >> shift];
      const auto* old = unaligned<float>(error.old) + i;
      auto* residual = unaligned<float>(error.residual) + i;
      for (std::size_t j = 0; j < length; ++j) {
        const float product = static_cast<float>(made[j]) * scale, decoded = Symmetric ? product : zero + product;
        residual[j].value = finite_or((values[j] - decoded) * error.divisor, old[j].value);
      }
    }
  }
}

template <Feedback Kind>
inline void encode_codes(const Codec& codec, const Rounding& args, const float* x, std::size_t n, std::size_t count,
                         const Blocks& at, std::uint8_t* planes, const ErrorTarget& error) {
  const auto run = !codec.stochastic
                       ? codec.symmetric ? encode_codes<true, false, Kind> : encode_codes<false, false, Kind>
                   : codec.symmetric ? encode_codes<true, true, Kind>
                                     : encode_codes<false, true, Kind>;
  run(codec, args, x, n, count, at, planes, error);
}

// WithError: `error` receives the error of the encoding.
template <bool WithError>
inline void encode_integer(const Codec& codec, const IntegerRules& rules, const Layout& layout, const float* x,
                           std::size_t n, const EncodeArgs& encoding, std::uint8_t* to, const ErrorTarget& error) {
  const std::uint64_t key = encoding.key, index = encoding.index;
  const std::size_t blocks = layout.blocks(n), count = blocks * codec.block;
  Blocks at;
  if (codec.symmetric) {
    const std::size_t whole = n >> layout.block_shift;
    codec.block == 32 ? measure<32>(x, whole, 32, at) : measure<0>(x, whole, codec.block, at);
    if (whole < blocks) at.top[whole] = largest(x + whole * codec.block, n - whole * codec.block);
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
  if constexpr (!WithError) {
    encode_codes<Feedback::none>(codec, args, x, n, count, at, planes, error);
  } else {
    // Decoded elements are at most the largest zero point plus about the largest element or range.
    std::uint32_t furthest = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
      furthest = magnitude(at.zero[b]) > furthest ? magnitude(at.zero[b]) : furthest;
    }
    const bool finite_errors = finite((float_of(worst) + float_of(furthest)) * 4.0f * error.divisor);
    const auto encode = finite_errors ? encode_codes<Feedback::finite> : encode_codes<Feedback::checked>;
    encode(codec, args, x, n, count, at, planes, error);
  }
  if (worst >= kInfinity32) {  // the codes of blocks with Inf or NaN are not zeros yet
    for (std::size_t b = 0; b < blocks; ++b) {
      if (at.top[b] >= kInfinity32) clear_codes(codec.bits, count, b * codec.block, codec.block, planes);
    }
  }
  __builtin_memset(to + layout.used(n), 0, layout.bytes(n) - layout.used(n));
}

}  // namespace dtcomm::DTCOMM_ISA
