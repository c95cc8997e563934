// Bit planes (codec/bit_planes.h) of rows of codes, and of kStep codes at a time, held as the bytes of one vector. The
// default build has no such vectors and works on groups of eight.
#pragma once

#include "codec/bit_planes.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

// A byte four times.
constexpr std::uint32_t byte_four_times(unsigned byte) { return (byte & 0xff) * 0x01010101u; }

// The bits that a plane holds, of each of four codes; none if there is no such plane.
constexpr std::uint32_t plane_mask(unsigned bits, unsigned unit) {
  return has_plane(bits, unit) ? byte_four_times(((1u << unit) - 1) << plane_low(bits, unit)) : 0;
}

// A row: kRowCodes codes, each a byte. Packing a row keeps the order of its codes, so that the first codes of a row are
// the first bits of what it is packed to.
#if defined(__AVX2__)

typedef __m256i Row;
constexpr std::size_t kRowCodes = 32;

inline __attribute__((always_inline)) Row load_row(const std::uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline __attribute__((always_inline)) void store_row(Row row, std::uint8_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), row);
}

// A row of equal bytes, `four` of which are given.
inline __attribute__((always_inline)) Row row_of(std::uint32_t four) {
  return _mm256_set1_epi32(static_cast<int>(four));
}

// Stores bits low .. low + Unit - 1 of the codes of a row: kRowCodes * Unit / 8 bytes. `low` is 0 for units of 4 and
// of 8.
template <unsigned Unit>
inline __attribute__((always_inline)) void pack_row(Row codes, unsigned low, std::uint8_t* to) {
  if constexpr (Unit == 8) {
    store_row(codes, to);
  } else if constexpr (Unit == 4) {
    const __m256i four = _mm256_and_si256(codes, _mm256_set1_epi8(0x0f));
    const __m256i words = _mm256_maddubs_epi16(four, _mm256_set1_epi16(0x1001));  // low + 16 * high
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  } else if constexpr (Unit == 2) {
    const __m256i shifted = _mm256_srl_epi16(codes, _mm_cvtsi32_si128(static_cast<int>(low)));
    const __m256i two = _mm256_and_si256(shifted, _mm256_set1_epi8(0x03));
    const __m256i words = _mm256_maddubs_epi16(two, _mm256_set1_epi16(0x0401));
    const __m256i sums = _mm256_madd_epi16(words, _mm256_set1_epi32(0x00100001));
    const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(sums, sums), sums);  // four bytes of each half
    const __m256i both = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(both));
  } else {
    const __m256i top = _mm256_sll_epi16(codes, _mm_cvtsi32_si128(static_cast<int>(7 - low)));
    const int one = _mm256_movemask_epi8(top);
    __builtin_memcpy(to, &one, sizeof one);
  }
}

// The inverse: the bits of the codes that `mask` has in each byte, which are some of low .. low + Unit - 1.
template <unsigned Unit>
inline __attribute__((always_inline)) Row unpack_row(const std::uint8_t* from, unsigned low, Row mask) {
  if constexpr (Unit == 8) return _mm256_and_si256(load_row(from), mask);
  if constexpr (Unit == 4) {
    const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4)), mask);
  } else if constexpr (Unit == 2) {
    const __m256i fours = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    const __m256i pairs =
        _mm256_and_si256(_mm256_or_si256(fours, _mm256_slli_epi32(fours, 12)), _mm256_set1_epi32(0x000f000f));
    const __m256i twos = _mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 6));
    return _mm256_and_si256(_mm256_sll_epi16(twos, _mm_cvtsi32_si128(static_cast<int>(low))), mask);
  } else {
    int one;
    __builtin_memcpy(&one, from, sizeof one);
    // Each of eight bytes tests its own bit of one byte of the plane.
    const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i digit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    const __m256i mine = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(one), byte), digit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(mine, digit), mask);
  }
}

inline __attribute__((always_inline)) Row join_rows(Row a, Row b) { return _mm256_or_si256(a, b); }

// Codes of two's complement as bytes of it; `sign` has the highest bit of each.
inline __attribute__((always_inline)) Row extend_sign(Row codes, Row sign) {
  return _mm256_sub_epi8(_mm256_xor_si256(codes, sign), sign);
}

// Signed bytes between two limits.
inline __attribute__((always_inline)) Row clamped(Row codes, Row lowest, Row highest) {
  return _mm256_min_epi8(_mm256_max_epi8(codes, lowest), highest);
}

#elif defined(DTCOMM_NEON)

typedef uint8x16_t Row;
constexpr std::size_t kRowCodes = 16;

inline __attribute__((always_inline)) Row load_row(const std::uint8_t* from) { return vld1q_u8(from); }
inline __attribute__((always_inline)) void store_row(Row row, std::uint8_t* to) { vst1q_u8(to, row); }
inline __attribute__((always_inline)) Row row_of(std::uint32_t four) { return vreinterpretq_u8_u32(vdupq_n_u32(four)); }

// Eight bytes, each the lower halves of two neighbours; the lower one holds `Unit` bits and the upper one has zeros
// below.
template <int Unit>
inline __attribute__((always_inline)) uint8x8_t join_neighbours(uint8x16_t codes) {
  const uint16x8_t pairs = vreinterpretq_u16_u8(codes);
  return vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 8 - Unit)));
}

// The inverse: the lower `Unit` bits of bytes, whose other bits are arbitrary.
template <int Unit>
inline __attribute__((always_inline)) uint8x16_t cut_neighbours(uint8x8_t joined) {
  const uint16x8_t pairs = vmovl_u8(joined);
  return vreinterpretq_u8_u16(vorrq_u16(pairs, vshlq_n_u16(pairs, 8 - Unit)));
}

// Bit j of byte j, in both halves.
inline __attribute__((always_inline)) uint8x16_t digits_of_bytes() {
  return vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
}

template <unsigned Unit>
inline __attribute__((always_inline)) void pack_row(Row codes, unsigned low, std::uint8_t* to) {
  if constexpr (Unit == 8) {
    store_row(codes, to);
  } else if constexpr (Unit == 4) {
    vst1_u8(to, join_neighbours<4>(vandq_u8(codes, vdupq_n_u8(0x0f))));
  } else if constexpr (Unit == 2) {
    const int8x16_t down = vdupq_n_s8(static_cast<std::int8_t>(-static_cast<int>(low)));
    const uint8x8_t fours = join_neighbours<2>(vandq_u8(vshlq_u8(codes, down), vdupq_n_u8(0x03)));
    const uint8x8_t eights = join_neighbours<4>(vcombine_u8(fours, fours));
    __builtin_memcpy(to, &eights, 4);
  } else {
    const uint8x16_t set = vtstq_u8(codes, vdupq_n_u8(static_cast<std::uint8_t>(1u << low)));
    const uint8x16_t digits = vandq_u8(set, digits_of_bytes());
    to[0] = vaddv_u8(vget_low_u8(digits));
    to[1] = vaddv_u8(vget_high_u8(digits));
  }
}

template <unsigned Unit>
inline __attribute__((always_inline)) Row unpack_row(const std::uint8_t* from, unsigned low, Row mask) {
  if constexpr (Unit == 8) return vandq_u8(vld1q_u8(from), mask);
  if constexpr (Unit == 4) {
    return vandq_u8(cut_neighbours<4>(vld1_u8(from)), mask);
  } else if constexpr (Unit == 2) {
    std::uint32_t raw;
    __builtin_memcpy(&raw, from, sizeof raw);
    const uint8x8_t fours = vand_u8(vget_low_u8(cut_neighbours<4>(vcreate_u8(raw))), vdup_n_u8(0x0f));
    const int8x16_t up = vdupq_n_s8(static_cast<std::int8_t>(low));
    return vandq_u8(vshlq_u8(cut_neighbours<2>(fours), up), mask);
  } else {
    return vandq_u8(vtstq_u8(vcombine_u8(vdup_n_u8(from[0]), vdup_n_u8(from[1])), digits_of_bytes()), mask);
  }
}

inline __attribute__((always_inline)) Row join_rows(Row a, Row b) { return vorrq_u8(a, b); }

inline __attribute__((always_inline)) Row extend_sign(Row codes, Row sign) {
  return vsubq_u8(veorq_u8(codes, sign), sign);
}

inline __attribute__((always_inline)) Row clamped(Row codes, Row lowest, Row highest) {
  const int8x16_t above = vmaxq_s8(vreinterpretq_s8_u8(codes), vreinterpretq_s8_u8(lowest));
  return vreinterpretq_u8_s8(vminq_s8(above, vreinterpretq_s8_u8(highest)));
}

#endif

#if defined(__AVX512F__)

typedef __m512i Step;
constexpr std::size_t kStep = 64;

// Stores codes i .. i + kStep - 1 of `count` in their planes; bits of a byte beyond `bits` are ignored.
inline __attribute__((always_inline)) void store_planes(Step codes, unsigned bits, std::size_t count, std::size_t i,
                                                        std::uint8_t* planes) {
  if (has_plane(bits, 8)) return _mm512_storeu_si512(planes + i, codes);
  if (has_plane(bits, 4)) {
    const __m512i four = _mm512_and_si512(codes, _mm512_set1_epi8(0x0f));
    const __m512i words = _mm512_maddubs_epi16(four, _mm512_set1_epi16(0x1001));  // low + 16 * high
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(planes + i / 2), _mm512_maskz_cvtepi16_epi8(~0u, words));
  }
  if (has_plane(bits, 2)) {
    const __m512i shifted = _mm512_srl_epi16(codes, _mm_cvtsi32_si128(static_cast<int>(plane_low(bits, 2))));
    const __m512i two = _mm512_and_si512(shifted, _mm512_set1_epi8(0x03));
    const __m512i words = _mm512_maddubs_epi16(two, _mm512_set1_epi16(0x0401));
    const __m512i sums = _mm512_madd_epi16(words, _mm512_set1_epi32(0x00100001));
    std::uint8_t* plane = planes + plane_at(bits, 2, count);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(plane + i / 4), _mm512_maskz_cvtepi32_epi8(0xffff, sums));
  }
  if (has_plane(bits, 1)) {
    const __m512i bit = _mm512_set1_epi8(static_cast<char>(1 << plane_low(bits, 1)));
    const std::uint64_t one = _mm512_test_epi8_mask(codes, bit);
    __builtin_memcpy(planes + plane_at(bits, 1, count) + i / 8, &one, sizeof one);
  }
}

// The inverse; the codes are unsigned.
inline __attribute__((always_inline)) Step load_planes(const std::uint8_t* planes, unsigned bits, std::size_t count,
                                                       std::size_t i) {
  if (has_plane(bits, 8)) return _mm512_loadu_si512(planes + i);
  __m512i codes = _mm512_setzero_si512();
  if (has_plane(bits, 4)) {
    const auto raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(planes + i / 2));
    const __m512i pairs = _mm512_maskz_cvtepu8_epi16(~0u, raw);
    codes = _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), _mm512_set1_epi8(0x0f));
  }
  if (has_plane(bits, 2)) {
    const std::uint8_t* plane = planes + plane_at(bits, 2, count);
    const auto raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(plane + i / 4));
    const __m512i fours = _mm512_maskz_cvtepu8_epi32(0xffff, raw);
    const __m512i pairs = _mm512_and_si512(_mm512_or_si512(fours, _mm512_maskz_slli_epi32(0xffff, fours, 12)),
                                           _mm512_set1_epi32(0x000f000f));
    const __m512i two = _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 6)), _mm512_set1_epi8(0x03));
    const __m128i low = _mm_cvtsi32_si128(static_cast<int>(plane_low(bits, 2)));
    codes = _mm512_or_si512(codes, _mm512_sll_epi16(two, low));
  }
  if (has_plane(bits, 1)) {
    std::uint64_t one;
    __builtin_memcpy(&one, planes + plane_at(bits, 1, count) + i / 8, sizeof one);
    const char bit = static_cast<char>(1 << plane_low(bits, 1));
    codes = _mm512_or_si512(codes, _mm512_maskz_set1_epi8(one, bit));
  }
  return codes;
}

inline __attribute__((always_inline)) Step extend_sign(Step codes, unsigned bits) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(1 << (bits - 1)));
  return _mm512_sub_epi8(_mm512_xor_si512(codes, sign), sign);
}

#if defined(__AVX512VBMI__)

// Where the bits of codes are taken from: byte `byte` of word q, of 8 bytes, gets code 2 q + 16 (byte % 4) + byte / 4
// of a step, so that lane j of 4 bytes has codes j, 16 + j, 32 + j and 48 + j.
struct BytePattern {
  std::uint8_t of[kStep];

  __attribute__((always_inline)) __m512i vector() const { return _mm512_load_si512(of); }
};

// The bytes of a plane of `unit` bits in which the codes of a word begin, for the lower half of each word.
constexpr BytePattern plane_bytes(unsigned unit) {
  BytePattern pattern{};
  for (unsigned i = 0; i < kStep; ++i)
    pattern.of[i] = static_cast<std::uint8_t>((2 * (i / 8) + 16 * (i % 4)) * unit / 8);
  return pattern;
}

// By how many bits those words are rotated to the right to bring a code's bits of the plane to bit `low` of its byte.
constexpr BytePattern plane_rotations(unsigned unit, unsigned low) {
  BytePattern pattern{};
  for (unsigned i = 0; i < kStep; ++i) {
    const unsigned code = 2 * (i / 8) + i % 8 / 4,
                   first = unit == 1 ? code + 16 * (i % 4) : 8 * (i % 4) + code * unit % 8;
    pattern.of[i] = static_cast<std::uint8_t>((first + 64 - low) % 64);
  }
  return pattern;
}

alignas(kLine) constexpr BytePattern kFourBytes = plane_bytes(4), kTwoBytes = plane_bytes(2);
alignas(kLine) constexpr BytePattern kFourRotations = plane_rotations(4, 0), kTwoRotations = plane_rotations(2, 4);
alignas(kLine) constexpr BytePattern kOneRotations[2] = {plane_rotations(1, 4), plane_rotations(1, 6)};

// The codes of a step, each in the lower `Bits` bits of a byte: lane j of 4 bytes has codes j, 16 + j, 32 + j and 48 +
// j. Other bits are arbitrary.
template <unsigned Bits>
inline __attribute__((always_inline)) Step load_words(const std::uint8_t* planes, std::size_t count, std::size_t i) {
  static_assert(Bits >= 5 && Bits <= 7, "codes with a plane of four bits and others");
  constexpr int kSelect = 0xca;  // bits of the second where the first has ones, else of the third
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  const __m512i raw = _mm512_maskz_loadu_epi32(0x00ff, planes + i / 2);
  const __m512i fours = _mm512_maskz_permutexvar_epi8(kAll, kFourBytes.vector(), raw);
  __m512i codes = _mm512_maskz_multishift_epi64_epi8(kAll, kFourRotations.vector(), fours);
  if constexpr (has_plane(Bits, 2)) {
    const __m512i bytes = _mm512_maskz_loadu_epi32(0x000f, planes + plane_at(Bits, 2, count) + i / 4);
    const __m512i twos = _mm512_maskz_permutexvar_epi8(kAll, kTwoBytes.vector(), bytes);
    const __m512i two = _mm512_maskz_multishift_epi64_epi8(kAll, kTwoRotations.vector(), twos);
    codes = _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x0f), codes, two, kSelect);
  }
  if constexpr (has_plane(Bits, 1)) {
    long long bits;
    __builtin_memcpy(&bits, planes + plane_at(Bits, 1, count) + i / 8, sizeof bits);
    const __m512i one =
        _mm512_maskz_multishift_epi64_epi8(kAll, kOneRotations[Bits == 7].vector(), _mm512_set1_epi64(bits));
    codes = _mm512_ternarylogic_epi32(_mm512_set1_epi8((1 << (Bits - 1)) - 1), codes, one, kSelect);
  }
  return codes;
}

#else

// A factor that compilers do not know: they would replace a product with it by several shifts and additions.
inline __attribute__((always_inline)) __m512i opaque_factor(short factor) {
  __m512i words = _mm512_set1_epi16(factor);
  asm("" : "+v"(words));
  return words;
}

// The codes of a step, each in the lower `Bits` bits of a byte: lane j of 4 bytes has codes j, 16 + j, 32 + j and 48 +
// j. Products instead of shifts, and few shuffles: those two share units.
template <unsigned Bits>
inline __attribute__((always_inline)) Step load_words(const std::uint8_t* planes, std::size_t count, std::size_t i) {
  static_assert(Bits >= 5 && Bits <= 7, "codes with a plane of four bits and others");
  const auto raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(planes + i / 2));
  const __m512i pairs = _mm512_maskz_cvtepu8_epi16(~0u, raw);
  __m512i codes = _mm512_ternarylogic_epi32(pairs, _mm512_mullo_epi16(pairs, opaque_factor(1 << 4)),
                                            _mm512_set1_epi8(0x0f), 0xa8);  // (1 | 2) & 3
  if constexpr (has_plane(Bits, 2)) {
    const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(planes + plane_at(Bits, 2, count) + i / 4));
    const __m512i fours = _mm512_maskz_cvtepu8_epi32(0xffff, bytes);
    const __m512i twice = _mm512_madd_epi16(fours, _mm512_set1_epi32(1 + (1 << 12)));
    const __m512i two = _mm512_and_si512(twice, _mm512_set1_epi32(0x000f000f));
    const __m512i apart = _mm512_mullo_epi16(two, opaque_factor((1 << 4) + (1 << 10)));
    codes = _mm512_ternarylogic_epi32(apart, _mm512_set1_epi8(0x30), codes, 0xea);  // (1 & 2) | 3
  }
  if constexpr (has_plane(Bits, 1)) {
    std::uint64_t one;
    __builtin_memcpy(&one, planes + plane_at(Bits, 1, count) + i / 8, sizeof one);
    codes = _mm512_mask_add_epi8(codes, one, codes, _mm512_set1_epi8(1 << (Bits - 1)));
  }
  const __m512i fours = _mm512_maskz_permutexvar_epi32(
      0xffff, _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), codes);
  return _mm512_shuffle_epi8(fours, _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400));
}

#endif

#elif defined(DTCOMM_VECTORS)

typedef Row Step;
constexpr std::size_t kStep = kRowCodes;

inline __attribute__((always_inline)) void store_planes(Step codes, unsigned bits, std::size_t count, std::size_t i,
                                                        std::uint8_t* planes) {
  if (has_plane(bits, 8)) return pack_row<8>(codes, 0, planes + i);
  if (has_plane(bits, 4)) pack_row<4>(codes, 0, planes + i / 2);
  if (has_plane(bits, 2)) pack_row<2>(codes, plane_low(bits, 2), planes + plane_at(bits, 2, count) + i / 4);
  if (has_plane(bits, 1)) pack_row<1>(codes, plane_low(bits, 1), planes + plane_at(bits, 1, count) + i / 8);
}

inline __attribute__((always_inline)) Step load_planes(const std::uint8_t* planes, unsigned bits, std::size_t count,
                                                       std::size_t i) {
  const auto mask = [bits](unsigned unit) { return row_of(plane_mask(bits, unit)); };
  if (has_plane(bits, 8)) return unpack_row<8>(planes + i, 0, mask(8));
  Step codes = row_of(0);
  if (has_plane(bits, 4)) codes = unpack_row<4>(planes + i / 2, 0, mask(4));
  if (has_plane(bits, 2)) {
    const std::uint8_t* plane = planes + plane_at(bits, 2, count) + i / 4;
    codes = join_rows(codes, unpack_row<2>(plane, plane_low(bits, 2), mask(2)));
  }
  if (has_plane(bits, 1)) {
    const std::uint8_t* plane = planes + plane_at(bits, 1, count) + i / 8;
    codes = join_rows(codes, unpack_row<1>(plane, plane_low(bits, 1), mask(1)));
  }
  return codes;
}

inline __attribute__((always_inline)) Step extend_sign(Step codes, unsigned bits) {
  return extend_sign(codes, row_of(byte_four_times(1u << (bits - 1))));
}

#endif

// Clears the codes of a block.
inline void clear_codes(unsigned bits, std::size_t count, std::size_t begin, std::size_t length, std::uint8_t* planes) {
  for (unsigned unit = 8; unit > 0; unit /= 2) {
    if (has_plane(bits, unit)) {
      __builtin_memset(planes + plane_at(bits, unit, count) + begin * unit / 8, 0, length * unit / 8);
    }
  }
}

}  // namespace dtcomm::DTCOMM_ISA
