// The element types of payloads, read kLanes at a time as fp32, and loops over them. The default build loops over
// single elements, which compilers vectorize as well as explicit vectors of four.
#pragma once

#include "codec/cast.h"
#include "cpu/source/loops.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

struct Fp32 {
  static constexpr std::size_t kBytes = 4;
  static float one(const void* from, std::size_t i) { return unaligned<float>(from)[i].value; }
#if defined(DTCOMM_VECTORS)
  static Floats many(const void* from, std::size_t i) { return load(static_cast<const float*>(from) + i); }
#endif
};

struct Fp16 {
  static constexpr std::size_t kBytes = 2;
  static float one(const void* from, std::size_t i) { return float_from_fp16(unaligned<std::uint16_t>(from)[i].value); }
#if defined(__AVX512F__)
  static Floats many(const void* from, std::size_t i) {
    const auto half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unaligned<std::uint16_t>(from) + i));
    // The masked form: the plain one trips gcc 12's warning about uninitialised values (GCC bug 105593).
    return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, half));
  }
#elif defined(__AVX2__)
  static Floats many(const void* from, std::size_t i) {
    const auto half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(unaligned<std::uint16_t>(from) + i));
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(half));
  }
#elif defined(DTCOMM_NEON)
  static Floats many(const void* from, std::size_t i) {
    float16x4_t half;
    __builtin_memcpy(&half, unaligned<std::uint16_t>(from) + i, sizeof half);
    return vcvt_f32_f16(half);
  }
#endif
};

struct Bf16 {
  static constexpr std::size_t kBytes = 2;
  static float one(const void* from, std::size_t i) { return float_from_bf16(unaligned<std::uint16_t>(from)[i].value); }
#if defined(__AVX512F__)
  static Floats many(const void* from, std::size_t i) {
    const auto half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unaligned<std::uint16_t>(from) + i));
    return reinterpret_cast<Floats>(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, half), 16));
  }
#elif defined(__AVX2__)
  static Floats many(const void* from, std::size_t i) {
    const auto half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(unaligned<std::uint16_t>(from) + i));
    return reinterpret_cast<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
#elif defined(DTCOMM_NEON)
  static Floats many(const void* from, std::size_t i) {
    uint16x4_t half;
    __builtin_memcpy(&half, unaligned<std::uint16_t>(from) + i, sizeof half);
    return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
  }
#endif
};

// One-byte codes, as integers.
template <class Byte>
struct Codes {
  static constexpr std::size_t kBytes = 1;
  static constexpr bool kSigned = Byte(-1) < Byte(0);
  static float one(const void* from, std::size_t i) {
    return static_cast<float>(static_cast<std::int32_t>(static_cast<const Byte*>(from)[i]));
  }
#if defined(__AVX512F__)
  static Floats many(const void* from, std::size_t i) {
    const auto raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const Byte*>(from) + i));
    const __m512i wide = kSigned ? _mm512_maskz_cvtepi8_epi32(0xffff, raw) : _mm512_maskz_cvtepu8_epi32(0xffff, raw);
    return reinterpret_cast<Floats>(_mm512_maskz_cvtepi32_ps(0xffff, wide));
  }
#elif defined(__AVX2__)
  static Floats many(const void* from, std::size_t i) {
    const auto raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const Byte*>(from) + i));
    const __m256i wide = kSigned ? _mm256_cvtepi8_epi32(raw) : _mm256_cvtepu8_epi32(raw);
    return reinterpret_cast<Floats>(_mm256_cvtepi32_ps(wide));
  }
#elif defined(DTCOMM_NEON)
  static Floats many(const void* from, std::size_t i) {
    std::uint32_t raw;
    __builtin_memcpy(&raw, static_cast<const Byte*>(from) + i, sizeof raw);
    if constexpr (kSigned) {
      return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(raw)))));
    } else {
      return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(raw)))));
    }
  }
#endif
};

// Whether `transform` can stream: where it works by single elements it stores through the cache.
#if defined(DTCOMM_VECTORS)
constexpr bool kDirect = true;
#else
constexpr bool kDirect = false;
#endif

// Elements i to i + kLanes.
template <class Element>
inline __attribute__((always_inline)) Floats many(const void* from, std::size_t i) {
#if defined(DTCOMM_VECTORS)
  return Element::many(from, i);
#else
  Floats found;
  for (std::size_t lane = 0; lane < kLanes; ++lane) found[lane] = Element::one(from, i + lane);
  return found;
#endif
}

// to[i] = make(element i) for i < n, `make` taking a float or Floats. A streamed `to` is aligned to a line.
template <class Element, bool Stream = false, class Make>
inline __attribute__((always_inline)) void transform(const void* from, std::size_t n, float* to, const Make& make) {
  std::size_t i = 0;
#if defined(DTCOMM_NEON)
  // With vectors this short the loop would take as many instructions as its body.
  for (const std::size_t whole = n / (4 * kLanes) * (4 * kLanes); i < whole; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (std::size_t j = i; j < i + 4 * kLanes; j += kLanes) store<Stream>(to + j, make(Element::many(from, j), j));
  }
#endif
#if defined(DTCOMM_VECTORS)
  for (; i + kLanes <= n; i += kLanes) store<Stream>(to + i, make(Element::many(from, i), i));
#endif
  auto* out = unaligned<float>(to);
  DTCOMM_INDEPENDENT
  for (; i < n; ++i) out[i].value = make(Element::one(from, i), i);
}

// Calls run(Element{}) for the element type of a floating dtype.
template <class Run>
inline __attribute__((always_inline)) void with_element(DType dtype, const Run& run) {
  if (dtype == DType::f32) {
    run(Fp32{});
  } else if (dtype == DType::f16) {
    run(Fp16{});
  } else {
    run(Bf16{});
  }
}

}  // namespace dtcomm::DTCOMM_ISA
