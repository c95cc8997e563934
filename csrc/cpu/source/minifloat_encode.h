// Encodes fp32 to small floats, for any number of blocks; float8 and mx share it.
#pragma once

#include "codec/counter_rng.h"
#include "codec/minifloat.h"
#include "cpu/source/bit_planes.h"
#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"
#include "cpu/source/step_randoms.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

#if defined(__AVX2__)
typedef std::uint32_t Words __attribute__((vector_size(kVector)));
typedef std::uint16_t Halves __attribute__((vector_size(kVector)));

// Adding a large number of the same sign to t leaves units of t's last place in the sum's low bits and nothing else
// there but the large number's own: kOffset. Units, offset and exponent, in units, add up to kBase and the code's size.
template <class F>
struct Large {
  static constexpr int kShift = 23 - F::kMantissa;
  static constexpr std::uint32_t kExponent = static_cast<std::uint32_t>(kShift) << 23;
  static constexpr std::uint32_t kLeast = (F::kNormal >> kShift) + (kExponent >> kShift);
  static constexpr std::uint32_t kOffset = (0U - kLeast) & ((2U << F::kSign) - 1);
  static constexpr std::uint32_t kBase = kLeast + kOffset;
  static_assert(kOffset % 2 == 0, "an odd one would turn ties");
  static_assert((kBase + 2 * F::kTop) << (kShift - 16) < 0x8000, "and it is a positive word, kShift - 16 bits up");
  // The large number over the power of two of t.
  static float factor() { return float_of((127U << 23) + kExponent + kOffset); }
};

// A float in all lanes: compilers leave the difference out, but not a sum, which would make +0 of -0.
inline __attribute__((always_inline)) Floats all_lanes(float x) { return x - Floats{}; }

// The power of two, with t's sign, whose product with kFactor is the large number.
template <class F>
inline __attribute__((always_inline)) Floats power_below(Floats t) {
  Words exponent = reinterpret_cast<Words>(t) & 0xff800000U;  // and sign
#if defined(__AVX512F__)
  const __m512 least = _mm512_set1_ps(float_of(F::kNormal));
  // The larger magnitude, with the sign of the first.
  return reinterpret_cast<Floats>(_mm512_maskz_range_ps(0xffff, reinterpret_cast<__m512>(exponent), least, 3));
#else
  const Words sign = exponent & 0x80000000U, size = exponent & 0x7fffffffU;
  exponent = (size > F::kNormal ? size : Words{} + F::kNormal) | sign;
  return reinterpret_cast<Floats>(exponent);
#endif
}

// t + power * kFactor, whose upper bits are sign and exponent of the large number. The product is exact, so that fusing
// it with the sum changes no bit; `minus` subtracts it again, which leaves the number that t is rounded to.
template <class F>
inline __attribute__((always_inline)) Floats add_large(Floats power, Floats t) {
#if defined(__AVX512F__)
  const auto factor = _mm512_set1_ps(Large<F>::factor());
  return reinterpret_cast<Floats>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(power), factor, reinterpret_cast<__m512>(t)));
#else
  const auto factor = _mm256_set1_ps(Large<F>::factor());
  return reinterpret_cast<Floats>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(power), factor, reinterpret_cast<__m256>(t)));
#endif
}

// The inverse, with t's sign even if it is zero; Saturate: numbers beyond F's largest one become the largest one.
template <class F, bool Saturate>
inline __attribute__((always_inline)) Floats minus_large(Floats power, Floats sum, Floats t) {
#if defined(__AVX512F__)
  const auto factor = _mm512_set1_ps(Large<F>::factor());
  __m512 rounded = _mm512_fnmadd_ps(reinterpret_cast<__m512>(power), factor, reinterpret_cast<__m512>(sum));
  if constexpr (Saturate) {
    rounded = _mm512_maskz_range_ps(0xffff, rounded, _mm512_set1_ps(F::kLargest), 2);  // the smaller magnitude
  }
  const __m512i sign = _mm512_set1_epi32(INT32_MIN);
  return reinterpret_cast<Floats>(_mm512_ternarylogic_epi32(
      _mm512_castps_si512(rounded), _mm512_castps_si512(reinterpret_cast<__m512>(t)), sign, 0xf8));  // 1 | (2 & 3)
#else
  const auto factor = _mm256_set1_ps(Large<F>::factor()), sign = _mm256_set1_ps(-0.0f);
  __m256 rounded = _mm256_fnmadd_ps(reinterpret_cast<__m256>(power), factor, reinterpret_cast<__m256>(sum));
  if constexpr (Saturate) rounded = _mm256_min_ps(_mm256_andnot_ps(sign, rounded), _mm256_set1_ps(F::kLargest));
  return reinterpret_cast<Floats>(_mm256_or_ps(rounded, _mm256_and_ps(reinterpret_cast<__m256>(t), sign)));
#endif
}

#if defined(__AVX512F__)
typedef __m512i Bytes;
#else
typedef __m256i Bytes;
#endif

// Codes, a word each, out of kBase and size, above kShift - 16 other bits and below the sign.
template <class F, bool Saturate>
inline __attribute__((always_inline)) Bytes codes_of(Bytes words) {
  constexpr std::uint16_t kSignBit = 1 << F::kSign, kSizes = kSignBit - 1;
  constexpr int kUp = Large<F>::kShift - 16;
  const Halves sign = reinterpret_cast<Halves>(words) >> (15 - F::kSign);  // and, below it, what the select drops
  Halves size = reinterpret_cast<Halves>(words);
  if constexpr (Saturate) {
    size &= 0x7fff;
    const Halves top = Halves{} + static_cast<std::uint16_t>((Large<F>::kBase + F::kTop) << kUp);
#if defined(__AVX512F__)
    size = reinterpret_cast<Halves>(
        _mm512_maskz_min_epu16(0xffffffff, reinterpret_cast<Bytes>(size), reinterpret_cast<Bytes>(top)));
#else
    size = reinterpret_cast<Halves>(_mm256_min_epu16(reinterpret_cast<Bytes>(size), reinterpret_cast<Bytes>(top)));
#endif
  }
  size = size >> kUp;
#if defined(__AVX512F__)
  const Bytes sizes = reinterpret_cast<Bytes>(Halves{} + kSizes);
  return _mm512_ternarylogic_epi32(sizes, reinterpret_cast<Bytes>(size), reinterpret_cast<Bytes>(sign), 0xca);  // ?:
#else
  return reinterpret_cast<Bytes>((size & kSizes) | (sign & kSignBit));
#endif
}

#if defined(__AVX512VBMI__)
// Bits of four words with a code each, from its fields in a word (codes_of): four bytes for the sizes, then four for
// the signs. Codes of 4 bits lie in the upper half of the first byte and in the lower half of the second, so that two
// neighbours are eight bits in a row.
template <class F>
constexpr BytePattern field_shifts() {
  BytePattern pattern{};
  for (unsigned i = 0; i < kStep; ++i) {
    const unsigned word = 16 * (i % 4), up = F::kSign == 3 && i % 2 == 0 ? 4 : 0;
    const unsigned first = i % 8 < 4 ? word + (Large<F>::kShift - 16) : word + (15 - F::kSign);
    pattern.of[i] = static_cast<std::uint8_t>(first - up);
  }
  return pattern;
}

template <class F>
struct CodeFields {
  static constexpr std::uint8_t kTop = static_cast<std::uint8_t>(Large<F>::kBase + F::kTop);
  // Two neighbours' largest sizes, and which of their bits are sizes.
  static constexpr std::uint16_t kTops = F::kSign == 3 ? kTop << 8 | 0x7f : kTop << 8 | kTop;
  static constexpr std::uint16_t kSizes = F::kSign == 3 ? 0x0770 : 0x7f7f;
  alignas(kLine) static constexpr BytePattern kShifts = field_shifts<F>();
};
#endif

// Stores the codes of four rows of kLanes elements; `sum_of(j)` is add_large of row j.
template <class F, bool Saturate, class SumOf>
inline __attribute__((always_inline)) void store_minifloats(const SumOf& sum_of, std::uint8_t* to) {
  // A multiply-add joins the halves of a sum: its units and its offset, and what stands above them with the sign. The
  // packs work within quarters (halves) of the vectors: the groups of four are put back in order.
  constexpr int kJoin = 1 << 16 | 1 << (Large<F>::kShift - 16);
  Bytes sums[4];
#if defined(__AVX512F__)
#pragma GCC unroll 4
  for (std::size_t j = 0; j < 4; ++j) {
    sums[j] = _mm512_madd_epi16(reinterpret_cast<Bytes>(sum_of(j)), _mm512_set1_epi32(kJoin));
  }
  const Bytes words[2] = {_mm512_packs_epi32(sums[0], sums[1]), _mm512_packs_epi32(sums[2], sums[3])};
#if defined(__AVX512VBMI__)
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  using Fields = CodeFields<F>;
  const Bytes shifts = Fields::kShifts.vector();
  const Bytes low = _mm512_maskz_multishift_epi64_epi8(kAll, shifts, words[0]);
  const Bytes high = _mm512_maskz_multishift_epi64_epi8(kAll, shifts, words[1]);
  const Bytes size_at = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 16, 20, 24, 28, 18, 22, 26, 30);
  const Bytes sign_at = _mm512_setr_epi32(1, 5, 9, 13, 3, 7, 11, 15, 17, 21, 25, 29, 19, 23, 27, 31);
  Bytes sizes = _mm512_maskz_permutex2var_epi32(0xffff, low, size_at, high);
  const Bytes signs = _mm512_maskz_permutex2var_epi32(0xffff, low, sign_at, high);
  if constexpr (Saturate) {
    sizes = _mm512_maskz_min_epu8(kAll, sizes, _mm512_set1_epi16(static_cast<short>(Fields::kTops)));
  }
  const Bytes mask = _mm512_set1_epi16(static_cast<short>(Fields::kSizes));
  const Bytes codes = _mm512_ternarylogic_epi32(mask, sizes, signs, 0xca);  // ?:
  if constexpr (F::kSign == 3) {
    const Bytes pairs = _mm512_maskz_multishift_epi64_epi8(kAll, _mm512_set1_epi64(0x34241404), codes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi64_epi32(0xff, pairs));
  } else {
    _mm512_storeu_si512(to, codes);
  }
#else
  const Bytes bytes = _mm512_packus_epi16(codes_of<F, Saturate>(words[0]), codes_of<F, Saturate>(words[1]));
  const Bytes codes = _mm512_maskz_permutexvar_epi32(
      0xffff, _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
  if constexpr (F::kSign == 3) {  // two neighbours share a byte, the earlier one its lower half
    const Bytes pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi16_epi8(0xffffffff, pairs));
  } else {
    _mm512_storeu_si512(to, codes);
  }
#endif
#else
#pragma GCC unroll 4
  for (std::size_t j = 0; j < 4; ++j) {
    sums[j] = _mm256_madd_epi16(reinterpret_cast<Bytes>(sum_of(j)), _mm256_set1_epi32(kJoin));
  }
  const Bytes words[2] = {_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3])};
  const Bytes bytes = _mm256_packus_epi16(codes_of<F, Saturate>(words[0]), codes_of<F, Saturate>(words[1]));
  const Bytes codes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  if constexpr (F::kSign == 3) {
    const Bytes pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
    const Bytes packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes);
  }
#endif
}
#elif defined(DTCOMM_NEON)
// nearest_minifloat (codec/minifloat.h) of four elements.
template <class F>
inline __attribute__((always_inline)) uint32x4_t nearest_minifloats(Floats t) {
  const Floats largest = vdupq_n_f32(F::kLargest), magnitudes = vabsq_f32(t);
  const Floats clipped = vbslq_f32(vcltq_f32(magnitudes, largest), magnitudes, largest);
  const uint32x4_t upper = vandq_u32(vreinterpretq_u32_f32(clipped), vdupq_n_u32(0xff800000));
  const uint32x4_t exponent = vmaxq_u32(upper, vdupq_n_u32(F::kNormal));
  const uint32x4_t large = vaddq_u32(exponent, vdupq_n_u32(std::uint32_t{23 - F::kMantissa} << 23));
  const Floats sum = vaddq_f32(clipped, vreinterpretq_f32_u32(large));
  const uint32x4_t units = vsubq_u32(vreinterpretq_u32_f32(sum), large);
  const uint32x4_t above = vshrq_n_u32(vsubq_u32(exponent, vdupq_n_u32(F::kNormal)), 23 - F::kMantissa);
  const uint32x4_t sign = vshrq_n_u32(vreinterpretq_u32_f32(t), 31 - F::kSign);
  return vbslq_u32(vdupq_n_u32(1U << F::kSign), sign, vaddq_u32(units, above));
}
#endif

// Clears the codes of blocks whose inverse is 0: zero blocks may have signs, NaN blocks anything.
inline void clear_unusable(const float* inverse, std::size_t blocks, std::size_t bytes, std::uint8_t* codes) {
  std::uint32_t least = ~0U;
  for (std::size_t b = 0; b < blocks; ++b) least = bits_of(inverse[b]) < least ? bits_of(inverse[b]) : least;
  if (least != 0) return;
  for (std::size_t b = 0; b < blocks; ++b) {
    if (inverse[b] == 0.0f) __builtin_memset(codes + b * bytes, 0, bytes);
  }
}

// The codes of `blocks` blocks, rounded to nearest; the error of the encoding goes to `error`. Saturate: the scale may
// be so small that an element rounds to more than the largest number.
template <class F, bool Saturate, Feedback Kind>
inline void nearest_codes(const float* x, std::size_t blocks, std::size_t block, const float* inverse,
                          [[maybe_unused]] const float* scales, [[maybe_unused]] const EncodeArgs& args,
                          std::uint8_t* codes, [[maybe_unused]] const ErrorTarget& error) {
  constexpr std::size_t kShare = F::kSign == 3 ? 2 : 1;  // codes in a byte
  std::size_t i = 0;
  const std::size_t n = blocks * block;
#if defined(__AVX2__)
  const int shift = __builtin_ctzll(block);
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    if (i % 64 == 0) prefetch_next(args, i);
    const Floats first = all_lanes(inverse[i >> shift]);
    Floats by[4] = {first, first, first, first}, scale[4] = {};
    if constexpr (Kind != Feedback::none) {
      for (std::size_t j = 0; j < 4; ++j) scale[j] = all_lanes(scales[i >> shift]);
    }
    if (block < 4 * kLanes) {
      for (std::size_t j = 1; j < 4; ++j) {
        const std::size_t b = (i + j * kLanes) >> shift;
        by[j] = all_lanes(inverse[b]);
        if constexpr (Kind != Feedback::none) scale[j] = all_lanes(scales[b]);
      }
    }
    const auto sum_of = [&](std::size_t j) __attribute__((always_inline)) {
      const std::size_t at = i + kLanes * j;
      const Floats value = load(x + at), t = value * by[j], power = power_below<F>(t), sum = add_large<F>(power, t);
      if constexpr (Kind != Feedback::none) {
        const Floats lost = (value - minus_large<F, Saturate>(power, sum, t) * scale[j]) * error.divisor;
        store<false>(error.residual + at, Kind == Feedback::finite ? lost : finite_or(lost, load(error.old + at)));
      }
      return sum;
    };
    store_minifloats<F, Saturate>(sum_of, codes + i / kShare);
  }
#elif defined(DTCOMM_NEON)
  static_assert(Kind == Feedback::none, "errors are computed from the codes");
  const int shift = __builtin_ctzll(block);
  for (; i < n; i += 16) {
    if (i % 64 == 0) prefetch_next(args, i);
    const float by = inverse[i >> shift];
    const auto four = [&](std::size_t at) { return nearest_minifloats<F>(vmulq_n_f32(load(x + i + at), by)); };
    const uint16x8_t low = vmovn_high_u32(vmovn_u32(four(0)), four(4));
    const uint16x8_t high = vmovn_high_u32(vmovn_u32(four(8)), four(12));
    const uint8x16_t made = vmovn_high_u16(vmovn_u16(low), high);
    if constexpr (kShare == 2) {
      vst1_u8(codes + i / 2, join_neighbours<4>(made));
    } else {
      vst1q_u8(codes + i, made);
    }
  }
#endif
  for (; i < n; i += 16) {
    const float by = inverse[i / block];
    const auto* in = unaligned<float>(x + i);
    std::uint8_t made[16];
    for (std::size_t j = 0; j < 16; ++j) made[j] = static_cast<std::uint8_t>(nearest_minifloat<F>(in[j].value * by));
    if constexpr (kShare == 2) {
      for (std::size_t j = 0; j < 8; ++j) {
        codes[i / 2 + j] = static_cast<std::uint8_t>(made[2 * j] | made[2 * j + 1] << 4);
      }
    } else {
      __builtin_memcpy(codes + i, made, sizeof made);
    }
    if constexpr (Kind != Feedback::none) {
      const float scale = scales[i / block];
      const auto* old = unaligned<float>(error.old + i);
      auto* residual = unaligned<float>(error.residual + i);
      for (std::size_t j = 0; j < 16; ++j) {
        const float decoded = minifloat_value<F>(made[j]) * scale;
        residual[j].value = finite_or((in[j].value - decoded) * error.divisor, old[j].value);
      }
    }
  }
}

// Encodes `blocks` blocks, rounding to nearest; codes are zeros if the inverse is 0. With `error` it may leave the
// error there too, and returns whether it did: it needs blocks that are neither zero nor NaN.
template <class F, bool Saturate>
inline bool minifloats_nearest(const float* x, std::size_t blocks, std::size_t block, const float* inverse,
                               const float* scales, const EncodeArgs& args, std::uint8_t* codes,
                               const ErrorTarget* error) {
#if defined(__AVX2__)
  if (error) {
    std::uint32_t least = ~0U, worst = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
      least = bits_of(inverse[b]) < least ? bits_of(inverse[b]) : least;
      worst = bits_of(scales[b]) > worst ? bits_of(scales[b]) : worst;
    }
    if (least != 0) {
      // Elements are less than twice the largest number, times their scale.
      const bool finite_errors = finite(float_of(worst) * F::kLargest * 4.0f * error->divisor);
      const auto run =
          finite_errors ? nearest_codes<F, Saturate, Feedback::finite> : nearest_codes<F, Saturate, Feedback::checked>;
      run(x, blocks, block, inverse, scales, args, codes, *error);
      return true;
    }
  }
#else
  static_cast<void>(error);
#endif
  nearest_codes<F, Saturate, Feedback::none>(x, blocks, block, inverse, scales, args, codes, {});
  clear_unusable(inverse, blocks, F::kSign == 3 ? block / 2 : block, codes);
  return false;
}

#if defined(DTCOMM_VECTORS)
// stochastic_minifloat (codec/minifloat.h) of a vector.
template <class F>
inline __attribute__((always_inline)) Randoms stochastic_minifloats(Floats t, Floats random) {
  typedef std::int32_t Signed __attribute__((vector_size(kVector)));
  const auto bits = reinterpret_cast<Randoms>(t);
  const Randoms top = Randoms{} + bits_of(F::kLargest), least = Randoms{} + F::kNormal;
  Randoms size = bits & 0x7fffffffU;
  size = size < top ? size : top;
  Randoms exponent = size & kInfinity32;
  exponent = exponent > least ? exponent : least;
  const Randoms per_unit = (std::uint32_t{254 + F::kMantissa} << 23) - exponent;
  const Floats scaled = reinterpret_cast<Floats>(size) * reinterpret_cast<Floats>(per_unit);
  const Signed floor = __builtin_convertvector(scaled, Signed);
  const Signed up = random < scaled - __builtin_convertvector(floor, Floats);  // -1 where it holds
  const Randoms units = reinterpret_cast<Randoms>(floor - up);
  const Randoms sign = bits >> (31 - F::kSign) & (1U << F::kSign);
  return (units + ((exponent - least) >> (23 - F::kMantissa))) | sign;
}

// The lowest bytes of a step's words, which are below 256.
inline __attribute__((always_inline)) Step bytes_of_words(const Randoms (&words)[4]) {
#if defined(__AVX512F__)
  const auto word = [&](std::size_t i) { return reinterpret_cast<__m512i>(words[i]); };
  const __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32(word(0), word(1)), _mm512_packs_epi32(word(2), word(3)));
  return _mm512_maskz_permutexvar_epi32(0xffff, _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                        bytes);
#elif defined(__AVX2__)
  const auto word = [&](std::size_t i) { return reinterpret_cast<__m256i>(words[i]); };
  const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(word(0), word(1)), _mm256_packs_epi32(word(2), word(3)));
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#else
  const auto word = [&](std::size_t i) { return reinterpret_cast<uint32x4_t>(words[i]); };
  const uint16x8_t low = vmovn_high_u32(vmovn_u32(word(0)), word(1));
  const uint16x8_t high = vmovn_high_u32(vmovn_u32(word(2)), word(3));
  return vmovn_high_u16(vmovn_u16(low), high);
#endif
}
#endif

// The same with stochastic rounding; `index` is the index of the first element in the caller's tensor.
template <class F>
inline void minifloats_stochastic(const float* x, std::size_t blocks, std::size_t block, const float* inverse,
                                  std::uint64_t key, std::uint64_t index, std::uint8_t* codes) {
  const std::size_t n = blocks * block;
  const bool one_stream = index >> 32 == (index + n) >> 32;
  const Stream stream = make_stream(key, index);
  const auto low = static_cast<std::uint32_t>(index);
  std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
  const int shift = __builtin_ctzll(block);
  StepRandoms randoms(stream);
  for (; one_stream && i + kStep <= n; i += kStep) {
    randoms.start(low + static_cast<std::uint32_t>(i));
    Randoms made[4];
#pragma GCC unroll 4
    for (std::size_t p = 0; p < 4; ++p) {
      const std::size_t at = i + p * kLanes;
      made[p] = stochastic_minifloats<F>(load(x + at) * inverse[at >> shift], randoms.part(p));
    }
    const Step bytes = bytes_of_words(made);
    __builtin_memcpy(codes + i, &bytes, sizeof bytes);
  }
#endif
  for (; i < n; i += 16) {  // in runs of a length that compilers know
    const float by = inverse[i / block];
    const auto* in = unaligned<float>(x + i);
    std::uint32_t made[16];
    if (one_stream) {
      for (std::size_t j = 0; j < 16; ++j) {
        made[j] = stochastic_minifloat<F>(in[j].value * by, uniform(stream, low + static_cast<std::uint32_t>(i + j)));
      }
    } else {
      for (std::size_t j = 0; j < 16; ++j) {
        const float random = uniform(make_stream(key, index + i + j), low + static_cast<std::uint32_t>(i + j));
        made[j] = stochastic_minifloat<F>(in[j].value * by, random);
      }
    }
    for (std::size_t j = 0; j < 16; ++j) codes[i + j] = static_cast<std::uint8_t>(made[j]);
  }
  clear_unusable(inverse, blocks, block, codes);
}

}  // namespace dtcomm::DTCOMM_ISA
