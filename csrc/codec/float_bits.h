// Bits of floats, for the scalar rules of the wire formats. Host and device compilers accept these functions and always
// inline them, so no copy compiled for one instruction set can be linked into code for another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DTCOMM_HD __host__ __device__ __forceinline__
#else
#define DTCOMM_HD inline __attribute__((always_inline))
#endif

namespace dtcomm {

constexpr std::uint32_t kInfinity32 = 0x7f800000;
constexpr std::uint32_t kNaN32 = 0x7fc00000;  // the canonical NaN, the only one that arithmetic and conversions write

DTCOMM_HD std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

DTCOMM_HD float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// |value| as an integer: ordered like the magnitudes, with Inf and then every NaN above all numbers.
DTCOMM_HD std::uint32_t magnitude(float value) { return bits_of(value) & 0x7fffffff; }

DTCOMM_HD bool finite(float value) { return magnitude(value) < kInfinity32; }

DTCOMM_HD float canonical(float value) { return value == value ? value : float_of(kNaN32); }

}  // namespace dtcomm
