// Codes: eight codes of up to eight bits, a byte each in two words; their bit planes in payloads; and bytes as floats.
#pragma once

#include <type_traits>

#include "codec/minifloat.h"
#include "cuda/vec8.cuh"

namespace dtcomm::cuda {

// Selects four of the bytes of (low, high), numbered 0..3 and 4..7, by the hexadecimal digits of `select`, lowest
// first.
DTCOMM_DEVICE std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high, std::uint32_t select) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, select);
#else
  const std::uint64_t both = static_cast<std::uint64_t>(high) << 32 | low;
  std::uint32_t selected = 0;
  for (int i = 0; i < 4; ++i)
    selected |= static_cast<std::uint32_t>(both >> (8 * (select >> (4 * i) & 7)) & 0xff) << (8 * i);
  return selected;
#endif
}

struct Codes {
  std::uint32_t word[2];
};

// The codes in the lowest bytes of eight integers.
DTCOMM_DEVICE Codes codes_of(const std::int32_t (&q)[kVec8]) {
  Codes codes;
  DTCOMM_UNROLL
  for (int w = 0; w < 2; ++w) {
    const auto byte = [&](int j) { return static_cast<std::uint32_t>(q[4 * w + j]); };
    codes.word[w] =
        permute_bytes(permute_bytes(byte(0), byte(1), 0x0040), permute_bytes(byte(2), byte(3), 0x0040), 0x5410);
  }
  return codes;
}

// Packs the lowest `Unit` bits of four bytes into the lowest bits; unpack_codes is the inverse.
template <int Unit>
DTCOMM_DEVICE std::uint32_t pack_codes(std::uint32_t v) {
  if constexpr (Unit == 8) return v;
  if constexpr (Unit == 4) {
    v &= 0x0f0f0f0fU;
    v = (v | v >> 4) & 0x00ff00ffU;
    return (v | v >> 8) & 0xffffU;
  }
  if constexpr (Unit == 2) {
    v &= 0x03030303U;
    v = (v | v >> 6) & 0x000f000fU;
    return (v | v >> 12) & 0xffU;
  }
  v &= 0x01010101U;
  v = (v | v >> 7) & 0x00030003U;
  return (v | v >> 14) & 0xfU;
}

template <int Unit>
DTCOMM_DEVICE std::uint32_t unpack_codes(std::uint32_t v) {
  if constexpr (Unit == 8) return v;
  if constexpr (Unit == 4) {
    v = (v & 0xffffU) | (v & 0xffffU) << 8;
    v &= 0x00ff00ffU;
    return (v | v << 4) & 0x0f0f0f0fU;
  }
  if constexpr (Unit == 2) {
    v &= 0xffU;
    v = (v | v << 12) & 0x000f000fU;
    return (v | v << 6) & 0x03030303U;
  }
  v &= 0xfU;
  v = (v | v << 14) & 0x00030003U;
  return (v | v << 7) & 0x01010101U;
}

// Stores one plane of a vec8's codes: bits shift .. shift + Unit - 1 of each.
template <int Unit, bool Aligned>
DTCOMM_DEVICE void store_plane(const Codes& codes, unsigned shift, std::uint8_t* to) {
  const std::uint64_t low = pack_codes<Unit>(codes.word[0] >> shift), high = pack_codes<Unit>(codes.word[1] >> shift);
  store_bytes<Unit, Aligned>(low | high << (4 * Unit), to);
}

template <int Unit, bool Aligned>
DTCOMM_DEVICE void load_plane(const std::uint8_t* from, unsigned shift, Codes& codes) {
  const std::uint64_t plane = load_bytes<Unit, Aligned>(from);
  codes.word[0] |= unpack_codes<Unit>(static_cast<std::uint32_t>(plane)) << shift;
  codes.word[1] |= unpack_codes<Unit>(static_cast<std::uint32_t>(plane >> (4 * Unit))) << shift;
}

// Stores the codes of the vec8 at element `at` of a granule whose `stored` codes of `bits` bits begin at `section`.
// There is a plane of 8, 4, 2 or 1 bits for each binary digit of `bits`; the lowest bits of the codes come first.
// `Aligned`: the section begins at a multiple of 8 bytes.
template <bool Aligned = false>
DTCOMM_DEVICE void store_codes(const Codes& codes, unsigned bits, std::uint32_t stored, std::uint32_t at,
                               std::uint8_t* section) {
  unsigned shift = 0;
  if (bits & 8) return store_plane<8, Aligned>(codes, 0, section + at);
  if (bits & 4) {
    store_plane<4, Aligned>(codes, 0, section + at / 2);
    shift = 4;
  }
  if (bits & 2) {
    store_plane<2, Aligned>(codes, shift, section + (stored * shift + at * 2) / 8);
    shift += 2;
  }
  if (bits & 1) store_plane<1, Aligned>(codes, shift, section + (stored * shift + at) / 8);
}

template <bool Aligned = false>
DTCOMM_DEVICE Codes load_codes(unsigned bits, std::uint32_t stored, std::uint32_t at, const std::uint8_t* section) {
  Codes codes = {};
  unsigned shift = 0;
  if (bits & 8) load_plane<8, Aligned>(section + at, 0, codes);
  if (bits & 4) {
    load_plane<4, Aligned>(section + at / 2, 0, codes);
    shift = 4;
  }
  if (bits & 2) {
    load_plane<2, Aligned>(section + (stored * shift + at * 2) / 8, shift, codes);
    shift += 2;
  }
  if (bits & 1) load_plane<1, Aligned>(section + (stored * shift + at) / 8, shift, codes);
  return codes;
}

// The eight 4-bit codes of a word, a byte each: element j is byte nibble_place(j).
DTCOMM_DEVICE Codes split_nibbles(std::uint32_t word) { return {{word & 0x0f0f0f0fU, word >> 4 & 0x0f0f0f0fU}}; }
DTCOMM_DEVICE constexpr int nibble_place(int j) { return j % 2 * 4 + j / 2; }

DTCOMM_DEVICE std::uint32_t code_at(const Codes& codes, int j) { return codes.word[j / 4] >> (8 * (j % 4)) & 0xff; }

// Byte j of the vec8, less `flip`, as a float: 2^23 + byte is a float whose last bits are the byte.
DTCOMM_DEVICE float float_of_byte(const Codes& codes, int j, float flip) {
  constexpr std::uint32_t kTwo23 = 0x4b000000U;
  const std::uint32_t bits = permute_bytes(codes.word[j / 4], kTwo23, 0x7650U + static_cast<unsigned>(j % 4));
  return float_of(bits) - (0x1p23f + flip);
}

// Devices from compute capability 8.9 on have instructions for pairs of e4m3: exact one way, and rounded as
// nearest_minifloat rounds the other way.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <class F>
constexpr bool kHasPairInstructions = std::is_same_v<F, E4m3>;
#else
template <class F>
constexpr bool kHasPairInstructions = false;
#endif

// The values of eight codes; NaN may have either sign.
template <class F>
DTCOMM_DEVICE void minifloat_values(const Codes& codes, float (&x)[kVec8]) {
  if constexpr (kHasPairInstructions<F>) {
#if defined(__CUDA_ARCH__)
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; j += 2) {
      const auto pair = static_cast<std::uint16_t>(codes.word[j / 4] >> (8 * (j % 4)));
      asm("{.reg .b32 pair; .reg .f16 low, high;\n\t"
          "cvt.rn.f16x2.e4m3x2 pair, %2;\n\t"
          "mov.b32 {low, high}, pair;\n\t"
          "cvt.f32.f16 %0, low;\n\t"
          "cvt.f32.f16 %1, high;}"
          : "=f"(x[j]), "=f"(x[j + 1])
          : "h"(pair));
    }
#endif
  } else {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = minifloat_value<F>(code_at(codes, j));
  }
}

// The codes of eight numbers, rounded to nearest; NaN may become any code.
template <class F>
DTCOMM_DEVICE Codes nearest_minifloats(const float (&t)[kVec8]) {
  Codes codes = {};
  if constexpr (kHasPairInstructions<F>) {
#if defined(__CUDA_ARCH__)
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; j += 2) {
      std::uint16_t pair;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(t[j + 1]), "f"(t[j]));
      codes.word[j / 4] |= static_cast<std::uint32_t>(pair) << (8 * (j % 4));
    }
#endif
  } else {
    std::int32_t code[kVec8];
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) code[j] = static_cast<std::int32_t>(nearest_minifloat<F>(t[j]));
    codes = codes_of(code);
  }
  return codes;
}

}  // namespace dtcomm::cuda
