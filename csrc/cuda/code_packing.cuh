// Codes: eight codes of up to eight bits, a byte each in two words; their bit planes in payloads; and bytes as floats.
#pragma once

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
template <int Unit>
DTCOMM_DEVICE void store_plane(const Codes& codes, unsigned shift, std::uint8_t* to) {
  const std::uint64_t low = pack_codes<Unit>(codes.word[0] >> shift), high = pack_codes<Unit>(codes.word[1] >> shift);
  store_bytes<Unit>(low | high << (4 * Unit), to);
}

template <int Unit>
DTCOMM_DEVICE void load_plane(const std::uint8_t* from, unsigned shift, Codes& codes) {
  const std::uint64_t plane = load_bytes<Unit>(from);
  codes.word[0] |= unpack_codes<Unit>(static_cast<std::uint32_t>(plane)) << shift;
  codes.word[1] |= unpack_codes<Unit>(static_cast<std::uint32_t>(plane >> (4 * Unit))) << shift;
}

// Stores the codes of the vec8 at element `at` of a granule whose `stored` codes of `bits` bits begin at `section`.
// There is a plane of 8, 4, 2 or 1 bits for each binary digit of `bits`; the lowest bits of the codes come first.
DTCOMM_DEVICE void store_codes(const Codes& codes, unsigned bits, std::uint32_t stored, std::uint32_t at,
                               std::uint8_t* section) {
  unsigned shift = 0;
  if (bits & 8) return store_plane<8>(codes, 0, section + at);
  if (bits & 4) {
    store_plane<4>(codes, 0, section + at / 2);
    shift = 4;
  }
  if (bits & 2) {
    store_plane<2>(codes, shift, section + (stored * shift + at * 2) / 8);
    shift += 2;
  }
  if (bits & 1) store_plane<1>(codes, shift, section + (stored * shift + at) / 8);
}

DTCOMM_DEVICE Codes load_codes(unsigned bits, std::uint32_t stored, std::uint32_t at, const std::uint8_t* section) {
  Codes codes = {};
  unsigned shift = 0;
  if (bits & 8) load_plane<8>(section + at, 0, codes);
  if (bits & 4) {
    load_plane<4>(section + at / 2, 0, codes);
    shift = 4;
  }
  if (bits & 2) {
    load_plane<2>(section + (stored * shift + at * 2) / 8, shift, codes);
    shift += 2;
  }
  if (bits & 1) load_plane<1>(section + (stored * shift + at) / 8, shift, codes);
  return codes;
}

DTCOMM_DEVICE std::uint32_t code_at(const Codes& codes, int j) { return codes.word[j / 4] >> (8 * (j % 4)) & 0xff; }

// Byte j of the vec8, less `flip`, as a float: 2^23 + byte is a float whose last bits are the byte.
DTCOMM_DEVICE float float_of_byte(const Codes& codes, int j, float flip) {
  constexpr std::uint32_t kTwo23 = 0x4b000000U;
  const std::uint32_t bits = permute_bytes(codes.word[j / 4], kTwo23, 0x7650U + static_cast<unsigned>(j % 4));
  return float_of(bits) - (0x1p23f + flip);
}

}  // namespace dtcomm::cuda
