// Runs of floats: narrowing to fp16 and bf16, widening from every element type, and the reductions of two runs.
#pragma once

#include "codec/cast.h"
#include "cpu/source/loops.h"
#include "cpu/source/simd_elements.h"

namespace dtcomm::DTCOMM_ISA {

// Rounds two vectors to bf16. It needs no 32-bit arithmetic: a carry out of the low word happens exactly if
// low + (high & 1) > 0x8000. Returns false, with nothing written, if there is a NaN.
#if defined(__AVX512F__)
template <bool Stream>
inline bool bf16_from_pair(const float* from, void* to) {
  const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
  if (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q)) return false;
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                        22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i low = _mm512_permutex2var_epi16(_mm512_castps_si512(a), even, _mm512_castps_si512(b));
  const __m512i high =
      _mm512_permutex2var_epi16(_mm512_castps_si512(a), _mm512_or_si512(even, one), _mm512_castps_si512(b));
  const __m512i edge = _mm512_adds_epu16(low, _mm512_and_si512(high, one));
  const __mmask32 carry = _mm512_cmpgt_epu16_mask(edge, _mm512_set1_epi16(static_cast<short>(0x8000)));
  const __m512i halves = _mm512_mask_add_epi16(high, carry, high, one);
  Stream ? _mm512_stream_si512(static_cast<__m512i*>(to), halves) : _mm512_storeu_si512(to, halves);
  return true;
}
constexpr std::size_t kPair = 32;
#elif defined(__AVX2__)
template <bool Stream>
inline bool bf16_from_pair(const float* from, void* to) {
  const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + 8);
  if (_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q))) return false;
  const auto round = [](__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  };
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(round(a), round(b)), 0xd8);
  auto* out = static_cast<__m256i*>(to);
  Stream ? _mm256_stream_si256(out, halves) : _mm256_storeu_si256(out, halves);
  return true;
}
constexpr std::size_t kPair = 16;
#elif defined(DTCOMM_NEON)
template <bool Stream>
inline bool bf16_from_pair(const float* from, void* to) {
  const auto round = [](Floats x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    return vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(std::uint32_t{kNaNBf16} << 16));
  };
  const uint16x8_t halves = vshrn_high_n_u32(vshrn_n_u32(round(load(from)), 16), round(load(from + 4)), 16);
  __builtin_memcpy(to, &halves, sizeof halves);
  return true;
}
constexpr std::size_t kPair = 8;
#endif

template <bool Stream>
inline void bf16_from_floats(const float* from, std::size_t n, void* to) {
  const auto* in = unaligned<float>(from);
  auto* out = unaligned<std::uint16_t>(to);
  std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
  for (const std::size_t whole = n / kPair * kPair; i < whole; i += kPair) {
    if (bf16_from_pair<Stream>(from + i, out + i)) continue;
    for (std::size_t j = i; j < i + kPair; ++j) out[j].value = bf16_from_float(in[j].value);
  }
#endif
  DTCOMM_INDEPENDENT
  for (; i < n; ++i) out[i].value = bf16_from_float(in[i].value);
}

// The instructions give the same bits as codec/cast.h, but for NaN (tests compare all 2^16 and a sample of 2^32).
template <bool Stream>
inline void fp16_from_floats(const float* from, std::size_t n, void* to) {
  const auto* in = unaligned<float>(from);
  auto* out = unaligned<std::uint16_t>(to);
  std::size_t i = 0;
#if defined(__AVX512F__)
  const __m256i quiet = _mm256_set1_epi16(static_cast<short>(kNaN16));
  for (; i + 16 <= n; i += 16) {
    const __m512 x = _mm512_loadu_ps(from + i);
    const __mmask16 number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
    const __m256i halves = _mm512_mask_cvtps_ph(quiet, number, x, _MM_FROUND_TO_NEAREST_INT);
    auto* target = reinterpret_cast<__m256i*>(out + i);
    Stream ? _mm256_stream_si256(target, halves) : _mm256_storeu_si256(target, halves);
  }
#elif defined(__AVX2__)
  const __m256 quiet = _mm256_set1_ps(float_of(kNaN32));
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_loadu_ps(from + i);
    const __m256 one_nan = _mm256_blendv_ps(x, quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m128i halves = _mm256_cvtps_ph(one_nan, _MM_FROUND_TO_NEAREST_INT);
    auto* target = reinterpret_cast<__m128i*>(out + i);
    Stream ? _mm_stream_si128(target, halves) : _mm_storeu_si128(target, halves);
  }
#elif defined(DTCOMM_NEON)
  for (const std::size_t whole = n / 8 * 8; i < whole; i += 8) {
    const Floats a = load(from + i), b = load(from + i + 4);
    const auto numbers = vcombine_u16(vmovn_u32(vceqq_f32(a, a)), vmovn_u32(vceqq_f32(b, b)));
    const auto halves = vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a), b));
    const uint16x8_t one_nan = vbslq_u16(numbers, halves, vdupq_n_u16(kNaN16));
    __builtin_memcpy(out + i, &one_nan, sizeof one_nan);
  }
#endif
  DTCOMM_INDEPENDENT
  for (; i < n; ++i) out[i].value = fp16_from_float(in[i].value);
}

// A streamed `to` is aligned to a line.
template <bool Stream = false>
inline void narrow(DType dtype, const float* from, std::size_t n, void* to) {
  if (dtype == DType::f32) {
    copy(to, from, n * sizeof(float), Stream);
  } else if (dtype == DType::f16) {
    fp16_from_floats<Stream>(from, n, to);
  } else {
    bf16_from_floats<Stream>(from, n, to);
  }
}

// `n` elements of a floating dtype into `to`; a streamed `to` is aligned to a line.
template <bool Stream>
inline void widen_into(DType dtype, const void* from, std::size_t n, float* to) {
  with_element(dtype, [&](auto element) {
    transform<decltype(element), Stream>(from, n, to, [](auto x, std::size_t) { return x; });
  });
}

// The same, but fp32 memory is returned as it is; otherwise the result is `scratch`.
inline const float* widen(DType dtype, const void* from, std::size_t n, float* scratch) {
  if (dtype == DType::f32) return static_cast<const float*>(from);
  widen_into<false>(dtype, from, n, scratch);
  return scratch;
}

// An fp32 run as an operand of `transform`: one element or a vector at an index.
struct FloatRun {
  const float* memory;
  float at(float, std::size_t i) const { return unaligned<float>(memory)[i].value; }
#if defined(DTCOMM_VECTORS)
  Floats at(Floats, std::size_t i) const { return load(memory + i); }
#endif
};

inline __attribute__((always_inline)) float with_canonical_nan(float x) { return canonical(x); }

#if defined(__AVX512F__)
inline __attribute__((always_inline)) Floats with_canonical_nan(Floats x) {
  const auto value = reinterpret_cast<__m512>(x);
  const __mmask16 number = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
  return reinterpret_cast<Floats>(_mm512_mask_mov_ps(_mm512_set1_ps(float_of(kNaN32)), number, value));
}
#elif defined(__AVX2__)
inline __attribute__((always_inline)) Floats with_canonical_nan(Floats x) {
  const auto value = reinterpret_cast<__m256>(x);
  const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  return reinterpret_cast<Floats>(_mm256_blendv_ps(value, _mm256_set1_ps(float_of(kNaN32)), nan));
}
#elif defined(DTCOMM_NEON)
inline __attribute__((always_inline)) Floats with_canonical_nan(Floats x) {
  return vbslq_f32(vceqq_f32(x, x), x, vdupq_n_f32(float_of(kNaN32)));
}
#endif

// x if it is finite, else y.
inline __attribute__((always_inline)) float finite_or(float x, float y) { return finite(x) ? x : y; }

#if defined(__AVX512F__)
inline __attribute__((always_inline)) Floats finite_or(Floats x, Floats y) {
  constexpr int kNoNumber = 0x99;  // quiet and signalling NaN, both infinities
  const auto value = reinterpret_cast<__m512>(x);
  const __mmask16 bad = _mm512_fpclass_ps_mask(value, kNoNumber);
  return reinterpret_cast<Floats>(_mm512_mask_mov_ps(value, bad, reinterpret_cast<__m512>(y)));
}
#elif defined(__AVX2__)
inline __attribute__((always_inline)) Floats finite_or(Floats x, Floats y) {
  const auto value = reinterpret_cast<__m256>(x);
  const __m256 size = _mm256_and_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
  const __m256 number = _mm256_cmp_ps(size, _mm256_set1_ps(float_of(kInfinity32)), _CMP_LT_OQ);
  return reinterpret_cast<Floats>(_mm256_blendv_ps(reinterpret_cast<__m256>(y), value, number));
}
#elif defined(DTCOMM_NEON)
inline __attribute__((always_inline)) Floats finite_or(Floats x, Floats y) {
  return vbslq_f32(vcaltq_f32(x, vdupq_n_f32(float_of(kInfinity32))), x, y);
}
#endif

// What the functions of a family (codec_family.h) do with a value: add it to a sum, add it to another granule's value,
// or subtract it from the encoded sum.
inline auto added_to(const float* sum) {
  return [run = FloatRun{sum}](auto value, std::size_t i) { return with_canonical_nan(run.at(value, i) + value); };
}

template <class Other>
inline auto plus(const Other& other) {
  return [other](auto value, std::size_t i) { return with_canonical_nan(value + other.at(value, i)); };
}

inline auto error_of(const float* sum, float divisor, const float* old) {
  return [run = FloatRun{sum}, before = FloatRun{old}, divisor](auto value, std::size_t i) {
    return finite_or((run.at(value, i) - value) * divisor, before.at(value, i));
  };
}

// to = sum + elements; `to` may be `sum`.
inline void add_elements(DType dtype, float* to, const float* sum, const void* from, std::size_t n) {
  with_element(dtype, [&](auto element) { transform<decltype(element)>(from, n, to, added_to(sum)); });
}

// NaN wins; of equal values (including +0 and -0) the first stays.
struct Min {
  static float join(float a, float b) { return b < a || b != b ? b : a; }
};

struct Max {
  static float join(float a, float b) { return b > a || b != b ? b : a; }
};

template <class Op>
inline void join_runs(float* to, const float* first, const float* second, std::size_t n) {
  auto* out = unaligned<float>(to);
  const auto* a = unaligned<float>(first);
  const auto* b = unaligned<float>(second);
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) out[i].value = canonical(Op::join(a[i].value, b[i].value));
}

// to = first (op) second; `to` may be either of them.
inline void join(ReduceOp op, float* to, const float* first, const float* second, std::size_t n) {
  if (op == ReduceOp::sum) {
    add_elements(DType::f32, to, first, second, n);
  } else if (op == ReduceOp::min) {
    join_runs<Min>(to, first, second, n);
  } else {
    join_runs<Max>(to, first, second, n);
  }
}

inline void divide(float* to, const float* from, std::size_t n, std::size_t divisor) {
  const float by = static_cast<float>(divisor);
  transform<Fp32>(from, n, to, [by](auto x, std::size_t) { return with_canonical_nan(x / by); });
}

}  // namespace dtcomm::DTCOMM_ISA
