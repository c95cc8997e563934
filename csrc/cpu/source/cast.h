// Runs of fp16 and bf16 to and from fp32, and the sums that every family shares.
#pragma once

#include "codec/cast.h"
#include "cpu/source/memory.h"

namespace dtcomm::DTCOMM_ISA {

inline void floats_from_bf16(const void* from, std::size_t n, float* to_memory) {
  const auto* in = cells<std::uint16_t>(from);
  auto* to = cells<float>(to_memory);
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) to[i].value = float_from_bf16(in[i].value);
}

inline void bf16_from_floats(const float* from, std::size_t n, void* to) {
  const auto* in = cells<float>(from);
  auto* out = cells<std::uint16_t>(to);
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) out[i].value = bf16_from_float(in[i].value);
}

// The instructions give the same bits as codec/cast.h (tests compare all 2^16 and 2^32 / stride inputs).
inline void floats_from_fp16(const void* from, std::size_t n, float* to_memory) {
  const auto* in = cells<std::uint16_t>(from);
  auto* to = cells<float>(to_memory);
  std::size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    // The masked form: the plain one trips gcc 12's warning about uninitialised values (GCC bug 105593).
    _mm512_storeu_ps(reinterpret_cast<float*>(to + i), _mm512_maskz_cvtph_ps(0xffff, half));
  }
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to + i),
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
#endif
#pragma GCC ivdep
  for (; i < n; ++i) to[i].value = float_from_fp16(in[i].value);
}

inline void fp16_from_floats(const float* from, std::size_t n, void* to) {
  const auto* in = cells<float>(from);
  auto* out = cells<std::uint16_t>(to);
  std::size_t i = 0;
#if defined(__AVX512F__)
  const __m256i quiet = _mm256_set1_epi16(static_cast<short>(kNaN16));
  for (; i + 16 <= n; i += 16) {
    const __m512 x = _mm512_loadu_ps(reinterpret_cast<const float*>(in + i));
    const __mmask16 number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm512_mask_cvtps_ph(quiet, number, x, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  const __m256 quiet = _mm256_set1_ps(float_of(kNaN32));
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_loadu_ps(reinterpret_cast<const float*>(in + i));
    const __m256 one_nan = _mm256_blendv_ps(x, quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(one_nan, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
#pragma GCC ivdep
  for (; i < n; ++i) out[i].value = fp16_from_float(in[i].value);
}

// `n` elements of a floating dtype as fp32: where they are fp32 already, the memory itself, otherwise `scratch`.
inline const float* widen(DType dtype, const void* from, std::size_t n, float* scratch) {
  if (dtype == DType::f32) return static_cast<const float*>(from);
  if (dtype == DType::f16) {
    floats_from_fp16(from, n, scratch);
  } else {
    floats_from_bf16(from, n, scratch);
  }
  return scratch;
}

inline void narrow(DType dtype, const float* from, std::size_t n, void* to) {
  if (dtype == DType::f32) {
    if (to != from) __builtin_memcpy(to, from, n * sizeof(float));
  } else if (dtype == DType::f16) {
    fp16_from_floats(from, n, to);
  } else {
    bf16_from_floats(from, n, to);
  }
}

struct Add {
  static float join(float a, float b) { return a + b; }
};

// NaN wins; of equals (+0 and -0 among them) the first stays.
struct Min {
  static float join(float a, float b) { return b < a || b != b ? b : a; }
};

struct Max {
  static float join(float a, float b) { return b > a || b != b ? b : a; }
};

template <class Op>
inline void join_runs(float* to, const float* first, const float* second, std::size_t n) {
  auto* out = cells<float>(to);
  const auto* a = cells<float>(first);
  const auto* b = cells<float>(second);
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) out[i].value = canonical(Op::join(a[i].value, b[i].value));
}

// to = first (op) second; `to` may be either of them.
inline void join(ReduceOp op, float* to, const float* first, const float* second, std::size_t n) {
  if (op == ReduceOp::sum) {
    join_runs<Add>(to, first, second, n);
  } else if (op == ReduceOp::min) {
    join_runs<Min>(to, first, second, n);
  } else {
    join_runs<Max>(to, first, second, n);
  }
}

inline void divide(float* to, const float* from, std::size_t n, std::size_t divisor) {
  const float by = static_cast<float>(divisor);
  auto* out = cells<float>(to);
  const auto* in = cells<float>(from);
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) out[i].value = canonical(in[i].value / by);
}

}  // namespace dtcomm::DTCOMM_ISA
