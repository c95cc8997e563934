// Access to unaligned memory, and non-temporal stores.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(DTCOMM_NEON)
#include <arm_neon.h>
#endif

// Defined where kernels use explicit vectors. DTCOMM_NEON is a definition of the build: every aarch64 compiler defines
// __ARM_NEON, for the generic kernels too.
#if defined(__AVX2__) || defined(DTCOMM_NEON)
#define DTCOMM_VECTORS 1
#endif

#include "core/types.h"

namespace dtcomm::DTCOMM_ISA {

#if defined(__AVX512F__)
// The bits of a mask. With a plain conversion gcc 12 may spill 16 bits of a mask and read 32 back, of which the upper
// 16 are undefined (seen in a build for the thread sanitizer).
inline __attribute__((always_inline)) std::uint32_t mask_bits(__mmask16 mask) {
  std::uint32_t word;
  asm("kmovw %1, %0" : "=r"(word) : "k"(mask));
  return word;
}
#endif

// An element at any address: loops over it vectorize to unaligned loads and stores.
template <class T>
struct __attribute__((packed, may_alias)) Unaligned {
  T value;
};

template <class T>
inline const Unaligned<T>* unaligned(const void* memory) {
  return static_cast<const Unaligned<T>*>(memory);
}

template <class T>
inline Unaligned<T>* unaligned(void* memory) {
  return static_cast<Unaligned<T>*>(memory);
}

inline std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

constexpr std::size_t kLine = 64;

#if defined(__AVX512F__)
constexpr std::size_t kVector = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVector = 32;
#else
constexpr std::size_t kVector = 16;
#endif
typedef float Floats __attribute__((vector_size(kVector)));
typedef float UnalignedFloats __attribute__((vector_size(kVector), aligned(1), may_alias));
constexpr std::size_t kLanes = kVector / sizeof(float);

// Non-temporal store of a vector to an address aligned to its size.
inline __attribute__((always_inline)) void stream_store(void* to, Floats value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(static_cast<float*>(to), reinterpret_cast<__m512>(value));
#elif defined(__AVX2__)
  _mm256_stream_ps(static_cast<float*>(to), reinterpret_cast<__m256>(value));
#elif defined(__x86_64__)
  _mm_stream_ps(static_cast<float*>(to), reinterpret_cast<__m128>(value));
#else
  *static_cast<Floats*>(to) = value;
#endif
}

inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <bool Stream>
inline __attribute__((always_inline)) void store(float* to, Floats value) {
  if constexpr (Stream) {
    stream_store(to, value);
  } else {
    *reinterpret_cast<UnalignedFloats*>(to) = value;
  }
}

inline __attribute__((always_inline)) Floats load(const float* from) {
  return *reinterpret_cast<const UnalignedFloats*>(from);
}

// Copies whole cache lines with non-temporal stores and the partial lines at both ends with ordinary ones. Needs a
// fence afterwards.
inline void stream_copy(void* to, const void* from, std::size_t bytes) {
  auto* out = static_cast<std::uint8_t*>(to);
  const auto* in = static_cast<const std::uint8_t*>(from);
  const std::size_t head = smaller((kLine - reinterpret_cast<std::uintptr_t>(out) % kLine) % kLine, bytes);
  __builtin_memcpy(out, in, head);
  std::size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    for (std::size_t part = 0; part < kLine; part += kVector) {
      stream_store(out + i + part, *reinterpret_cast<const UnalignedFloats*>(in + i + part));
    }
  }
  __builtin_memcpy(out + i, in + i, bytes - i);
}

inline void copy(void* to, const void* from, std::size_t bytes, bool stream) {
  if (to == from || bytes == 0) return;
  if (stream) {
    stream_copy(to, from, bytes);
  } else {
    __builtin_memcpy(to, from, bytes);
  }
}

}  // namespace dtcomm::DTCOMM_ISA
