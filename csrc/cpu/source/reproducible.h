// Codec `exact`: floats to integers and back. It has the loops over one block, and the passes over tensors of a
// collective whose ranks agree on the exponents (LocalKernels in cpu/kernels.h).
#pragma once

#include "codec/reproducible.h"
#include "cpu/kernels.h"
#include "cpu/source/blocks.h"
#include "cpu/source/cast.h"
#include "cpu/source/fp_env.h"
#include "cpu/source/loops.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

constexpr std::size_t kSpan = kLargestBlock;  // elements taken at once: whole blocks of any length

// Arithmetic in fp32 gives the same integers and floats as fp64 where 2^exponent and its inverse are normal numbers: a
// product with a power of two is then exact or, as an integer, rounds to 0, and rounding an integer of up to 32 bits to
// fp32 is the only other step. A float of 24 bits is at most 2^31 - 2^7 as an integer, so that the instruction that
// makes it one does not overflow.
inline bool fits_fp32(int exponent) { return exponent >= -126 && exponent <= 126; }

#if defined(__AVX512F__)
typedef __m512i Integers;
inline __attribute__((always_inline)) Integers nearest_integers(Floats t) {
  return _mm512_maskz_cvtps_epi32(0xffff, reinterpret_cast<__m512>(t));
}
inline __attribute__((always_inline)) Floats floats_of_integers(Integers codes) {
  return reinterpret_cast<Floats>(_mm512_maskz_cvtepi32_ps(0xffff, codes));
}
inline __attribute__((always_inline)) Integers clamped_integers(Integers codes, std::int32_t most) {
  const Integers above = _mm512_maskz_max_epi32(0xffff, codes, _mm512_set1_epi32(-most));
  return _mm512_maskz_min_epi32(0xffff, above, _mm512_set1_epi32(most));
}
inline __attribute__((always_inline)) void store_integers(Integers codes, std::int32_t* to) {
  _mm512_storeu_si512(to, codes);
}
inline __attribute__((always_inline)) void store_integers(Integers codes, std::int16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, codes));
}
inline __attribute__((always_inline)) Integers load_integers(const std::int32_t* from) {
  return _mm512_loadu_si512(from);
}
inline __attribute__((always_inline)) Integers load_integers(const std::int16_t* from) {
  return _mm512_maskz_cvtepi16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
#elif defined(__AVX2__)
typedef __m256i Integers;
inline __attribute__((always_inline)) Integers nearest_integers(Floats t) {
  return _mm256_cvtps_epi32(reinterpret_cast<__m256>(t));
}
inline __attribute__((always_inline)) Floats floats_of_integers(Integers codes) {
  return reinterpret_cast<Floats>(_mm256_cvtepi32_ps(codes));
}
inline __attribute__((always_inline)) Integers clamped_integers(Integers codes, std::int32_t most) {
  return _mm256_min_epi32(_mm256_max_epi32(codes, _mm256_set1_epi32(-most)), _mm256_set1_epi32(most));
}
inline __attribute__((always_inline)) void store_integers(Integers codes, std::int32_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes);
}
inline __attribute__((always_inline)) void store_integers(Integers codes, std::int16_t* to) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
}
inline __attribute__((always_inline)) Integers load_integers(const std::int32_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline __attribute__((always_inline)) Integers load_integers(const std::int16_t* from) {
  return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#elif defined(DTCOMM_NEON)
typedef int32x4_t Integers;
inline __attribute__((always_inline)) Integers nearest_integers(Floats t) { return vcvtnq_s32_f32(t); }
inline __attribute__((always_inline)) Floats floats_of_integers(Integers codes) { return vcvtq_f32_s32(codes); }
inline __attribute__((always_inline)) Integers clamped_integers(Integers codes, std::int32_t most) {
  return vminq_s32(vmaxq_s32(codes, vdupq_n_s32(-most)), vdupq_n_s32(most));
}
inline __attribute__((always_inline)) void store_integers(Integers codes, std::int32_t* to) {
  __builtin_memcpy(to, &codes, sizeof codes);
}
inline __attribute__((always_inline)) void store_integers(Integers codes, std::int16_t* to) {
  const int16x4_t words = vmovn_s32(codes);
  __builtin_memcpy(to, &words, sizeof words);
}
inline __attribute__((always_inline)) Integers load_integers(const std::int32_t* from) {
  Integers codes;
  __builtin_memcpy(&codes, from, sizeof codes);
  return codes;
}
inline __attribute__((always_inline)) Integers load_integers(const std::int16_t* from) {
  int16x4_t words;
  __builtin_memcpy(&words, from, sizeof words);
  return vmovl_s16(words);
}
#endif

template <class Code>
inline void to_codes(const float* x, std::size_t n, std::uint8_t exponent, int digits, void* to) {
  auto* codes = unaligned<Code>(to);
  if (exponent == kNaNBlock) {
    __builtin_memset(to, 0, n * sizeof(Code));
    return;
  }
  const double per_unit = power_of_two(-unit_exponent(exponent, digits)), most = largest_integer(digits);
  const auto* in = unaligned<float>(x);
  std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
  if (fits_fp32(unit_exponent(exponent, digits))) {
    const auto by = static_cast<float>(per_unit);
    for (; i + kLanes <= n; i += kLanes) {
      const Integers made = clamped_integers(nearest_integers(load(x + i) * by), static_cast<std::int32_t>(most));
      store_integers(made, static_cast<Code*>(to) + i);
    }
  }
#endif
  DTCOMM_INDEPENDENT
  for (; i < n; ++i) {
    codes[i].value = static_cast<Code>(static_cast<std::int32_t>(to_integer(in[i].value, per_unit, most)));
  }
}

template <class Code>
inline void from_codes(const void* from, std::size_t n, std::uint8_t exponent, int digits, double divisor, float* to) {
  const auto* codes = unaligned<Code>(from);
  auto* out = unaligned<float>(to);
  if (exponent == kNaNBlock) {
    for (std::size_t i = 0; i < n; ++i) out[i].value = float_of(kNaN32);
    return;
  }
  const double unit = power_of_two(unit_exponent(exponent, digits));
  if (divisor == 1.0) {
    std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
    if (fits_fp32(unit_exponent(exponent, digits))) {
      const auto by = static_cast<float>(unit);
      for (; i + kLanes <= n; i += kLanes) {
        store<false>(to + i, floats_of_integers(load_integers(static_cast<const Code*>(from) + i)) * by);
      }
    }
#endif
    DTCOMM_INDEPENDENT
    for (; i < n; ++i) {
      out[i].value = static_cast<float>(static_cast<double>(static_cast<std::int32_t>(codes[i].value)) * unit);
    }
    return;
  }
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const double sum = static_cast<double>(static_cast<std::int32_t>(codes[i].value)) * unit;
    out[i].value = static_cast<float>(sum / divisor);
  }
}

inline void put_codes(int bits, const float* x, std::size_t n, std::uint8_t exponent, int digits, void* to) {
  if (bits == 16) return to_codes<std::int16_t>(x, n, exponent, digits, to);
  to_codes<std::int32_t>(x, n, exponent, digits, to);
}

inline void get_codes(int bits, const void* from, std::size_t n, std::uint8_t exponent, int digits, double divisor,
                      float* to) {
  if (bits == 16) return from_codes<std::int16_t>(from, n, exponent, digits, divisor, to);
  from_codes<std::int32_t>(from, n, exponent, digits, divisor, to);
}

// Calls use(x, at, n) for the spans of a contribution; x is its local tensor plus its residual in fp32.
template <class Use>
inline void each_span(const Contribution& from, const Use& use) {
  alignas(kLine) float scratch[kSpan];
  for (std::size_t at = 0; at < from.numel; at += kSpan) {
    const std::size_t n = smaller(kSpan, from.numel - at);
    const auto* local = static_cast<const std::uint8_t*>(from.local) + at * size_of(from.dtype);
    const float* x = widen(from.dtype, local, n, scratch);
    if (from.residual) {
      join(ReduceOp::sum, scratch, x, from.residual + at, n);
      x = scratch;
    }
    use(x, at, n);
  }
}

inline void measure_exponents(const Codec& codec, const Contribution& from, std::uint8_t* exponents) {
  const ScopedFpEnv environment;
  each_span(from, [&](const float* x, std::size_t at, std::size_t n) {
    for (std::size_t i = 0; i < n; i += codec.block) {
      exponents[(at + i) / codec.block] = exponent_of(largest(x + i, smaller(codec.block, n - i)));
    }
  });
}

// The error of an element is a multiple of its last bit and less than two units: fp32 holds it. `exponent`: of the
// unit.
template <class Code>
inline void keep_lost(const float* x, std::size_t n, const void* codes, int exponent, float* residual) {
  const auto* in = unaligned<float>(x);
  const auto* made = unaligned<Code>(codes);
  auto* to = unaligned<float>(residual);
  const double unit = power_of_two(exponent);
  std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
  if (fits_fp32(exponent)) {  // a code has no more bits than its element, unless it was rounded to fewer than 24
    const auto by = static_cast<float>(unit);
    for (; i + kLanes <= n; i += kLanes) {
      store<false>(residual + i,
                   load(x + i) - floats_of_integers(load_integers(static_cast<const Code*>(codes) + i)) * by);
    }
  }
#endif
  DTCOMM_INDEPENDENT
  for (; i < n; ++i) {
    to[i].value = static_cast<float>(static_cast<double>(in[i].value) - static_cast<double>(made[i].value) * unit);
  }
}

inline void quantize_to_exponents(const Codec& codec, std::size_t ranks, const Contribution& from,
                                  const std::uint8_t* exponents, void* codes) {
  const ScopedFpEnv environment;
  const int digits = digits_of(codec.bits, ranks);
  each_span(from, [&](const float* x, std::size_t at, std::size_t n) {
    for (std::size_t i = 0; i < n; i += codec.block) {
      const std::size_t count = smaller(codec.block, n - i);
      const std::uint8_t exponent = exponents[(at + i) / codec.block];
      auto* to = static_cast<std::uint8_t*>(codes) + (at + i) * codec.bits / 8;
      put_codes(codec.bits, x + i, count, exponent, digits, to);
      if (!from.residual || exponent == kNaNBlock) continue;
      const auto keep = codec.bits == 16 ? keep_lost<std::int16_t> : keep_lost<std::int32_t>;
      keep(x + i, count, to, unit_exponent(exponent, digits), from.residual + at + i);
    }
  });
}

inline void dequantize(const Codec& codec, std::size_t ranks, const void* codes, const std::uint8_t* exponents,
                       std::size_t numel, std::size_t divisor, DType dtype, void* out) {
  const ScopedFpEnv environment;
  const int digits = digits_of(codec.bits, ranks);
  alignas(kLine) float scratch[kSpan];
  for (std::size_t at = 0; at < numel; at += kSpan) {
    const std::size_t n = smaller(kSpan, numel - at);
    auto* const to = static_cast<std::uint8_t*>(out) + at * size_of(dtype);
    float* const floats = dtype == DType::f32 ? reinterpret_cast<float*>(to) : scratch;
    for (std::size_t i = 0; i < n; i += codec.block) {
      const auto* from = static_cast<const std::uint8_t*>(codes) + (at + i) * codec.bits / 8;
      get_codes(codec.bits, from, smaller(codec.block, n - i), exponents[(at + i) / codec.block], digits,
                static_cast<double>(divisor), floats + i);
    }
    if (floats == scratch) narrow(dtype, scratch, n, to);
  }
}

template <class Code>
inline std::uint64_t checksum(const void* codes, std::size_t at, std::size_t n) {
  const auto* in = unaligned<Code>(static_cast<const std::uint8_t*>(codes) + at * sizeof(Code));
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto weight = audit_weight(static_cast<std::uint32_t>(at + i));
    sum += weight * static_cast<std::uint64_t>(static_cast<std::int64_t>(in[i].value));
  }
  return sum;
}

inline void audit_checksums(int bits, const void* codes, std::size_t numel, std::uint64_t* sums) {
  for (std::size_t at = 0; at < numel; at += kAuditRun) {
    const std::size_t n = smaller(kAuditRun, numel - at);
    sums[at / kAuditRun] = bits == 16 ? checksum<std::int16_t>(codes, at, n) : checksum<std::int32_t>(codes, at, n);
  }
}

}  // namespace dtcomm::DTCOMM_ISA
