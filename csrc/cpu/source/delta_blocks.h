// Comparisons of 64 elements or bytes at a time, whose results are the bits of a word, and bit planes of 64 integers.
#pragma once

#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

constexpr std::size_t kBlock = 64;

inline unsigned lowest_bit(std::uint64_t word) { return static_cast<unsigned>(__builtin_ctzll(word)); }

#if defined(__AVX512F__) || defined(__AVX2__) || defined(DTCOMM_NEON)
inline unsigned count_bits(std::uint64_t word) { return static_cast<unsigned>(__builtin_popcountll(word)); }
#else
// Without an instruction for it, compilers call a function that reads a table.
inline unsigned count_bits(std::uint64_t word) {
  word -= word >> 1 & 0x5555555555555555;
  word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
  return static_cast<unsigned>(((word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f) * 0x0101010101010101 >> 56);
}
#endif

// The place of the bit of `word` that has `rank` set bits below it.
inline unsigned select_bit(std::uint64_t word, unsigned rank) {
#if defined(__BMI2__)
  return lowest_bit(_pdep_u64(std::uint64_t{1} << rank, word));
#else
  for (; rank > 0; --rank) word &= word - 1;
  return lowest_bit(word);
#endif
}

// The lowest bits of `bits`, in order, at the places of the bits of `mask`.
inline std::uint64_t deposit_bits(std::uint64_t bits, std::uint64_t mask) {
#if defined(__BMI2__)
  return _pdep_u64(bits, mask);
#else
  const unsigned count = count_bits(mask);
  if (count < 64) bits &= (std::uint64_t{1} << count) - 1;
  std::uint64_t places = 0;
  for (; bits != 0; bits &= bits - 1) places |= std::uint64_t{1} << select_bit(mask, lowest_bit(bits));
  return places;
#endif
}

// Bit i says whether byte i of 64 has the same value at both places.
inline std::uint64_t equal_bytes(const std::uint8_t* a, const std::uint8_t* b) {
#if defined(__AVX512F__)
  return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
#elif defined(__AVX2__)
  const auto half = [&](std::size_t at) {
    const __m256i one = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + at));
    const __m256i other = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + at));
    return std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(one, other)))};
  };
  return half(0) | half(32) << 32;
#elif defined(DTCOMM_NEON)
  const uint8x16_t places = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
  const auto part = [&](std::size_t i) {
    return vandq_u8(vceqq_u8(vld1q_u8(a + 16 * i), vld1q_u8(b + 16 * i)), places);
  };
  const uint8x16_t halves = vpaddq_u8(vpaddq_u8(part(0), part(1)), vpaddq_u8(part(2), part(3)));
  return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(halves, halves)), 0);
#else
  constexpr std::uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < kBlock; i += 8) {
    const std::uint64_t differ = unaligned<std::uint64_t>(a + i)->value ^ unaligned<std::uint64_t>(b + i)->value;
    const std::uint64_t equal = ~(((differ & kLow) + kLow) | differ | kLow);  // the highest bit of each equal byte
    word |= (equal >> 7) * 0x0102040810204080 >> 56 << i;
  }
  return word;
#endif
}

// The lowest bits of pairs of bits, side by side.
inline std::uint64_t every_second_bit(std::uint64_t word) {
#if defined(__BMI2__)
  return _pext_u64(word, 0x5555555555555555);
#else
  word &= 0x5555555555555555;
  word = (word | word >> 1) & 0x3333333333333333;
  word = (word | word >> 2) & 0x0f0f0f0f0f0f0f0f;
  word = (word | word >> 4) & 0x00ff00ff00ff00ff;
  word = (word | word >> 8) & 0x0000ffff0000ffff;
  return (word | word >> 16) & 0x00000000ffffffff;
#endif
}

// Bit i says whether element i of 64 differs.
template <class T>
inline std::uint64_t differing(const T* a, const T* b) {
  std::uint64_t word = 0;
  for (std::size_t part = 0; part < sizeof(T); ++part) {
    const std::size_t at = part * kBlock;
    std::uint64_t bytes =
        ~equal_bytes(reinterpret_cast<const std::uint8_t*>(a) + at, reinterpret_cast<const std::uint8_t*>(b) + at);
    if (sizeof(T) >= 2) bytes = every_second_bit(bytes | bytes >> 1);
    if (sizeof(T) == 4) bytes = every_second_bit(bytes | bytes >> 1);
    word |= bytes << at / sizeof(T);
  }
  return word;
}

// 64 bytes that are compared with several numbers.
#if defined(__AVX512F__)
struct Bytes {
  __m512i value;
  explicit Bytes(__m512i bytes) : value(bytes) {}
  explicit Bytes(const std::uint8_t* from) : value(_mm512_loadu_si512(from)) {}
  void store(std::uint8_t* to) const { _mm512_storeu_si512(to, value); }
  std::uint64_t equal(std::uint8_t number) const {
    return _mm512_cmpeq_epi8_mask(value, _mm512_set1_epi8(static_cast<char>(number)));
  }
};
#else
struct Bytes {
  std::uint8_t value[kBlock];
  explicit Bytes(const std::uint8_t* from) { __builtin_memcpy(value, from, sizeof value); }
  void store(std::uint8_t* to) const { __builtin_memcpy(to, value, sizeof value); }
  std::uint64_t equal(std::uint8_t number) const {
    std::uint8_t all[kBlock];
    __builtin_memset(all, number, sizeof all);
    return equal_bytes(value, all);
  }
};
#endif

// top - ((element & mask) >> shift) of 64 elements, at least 0 and at most `last`.
template <class T>
inline Bytes distances(const T* elements, T mask, unsigned shift, unsigned top, unsigned last) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) {  // written out, as a vector that was stored in two parts is slow to load
    const auto half = [&](std::size_t at) {
      const __m512i x =
          _mm512_and_si512(_mm512_loadu_si512(elements + at), _mm512_set1_epi16(static_cast<short>(mask)));
      const __m512i exponents = _mm512_srl_epi16(x, _mm_cvtsi32_si128(static_cast<int>(shift)));
      const __m512i below = _mm512_subs_epu16(_mm512_set1_epi16(static_cast<short>(top)), exponents);
      return _mm512_maskz_cvtepi16_epi8(~__mmask32{0},
                                        _mm512_min_epu16(below, _mm512_set1_epi16(static_cast<short>(last))));
    };
    return Bytes(_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(half(0)), half(32), 1));
  }
#endif
  T copy[kBlock];
  __builtin_memcpy(copy, elements, sizeof copy);
  std::uint8_t bytes[kBlock];
  for (std::size_t i = 0; i < kBlock; ++i) {
    const auto exponent = static_cast<T>((copy[i] & mask) >> shift), most = static_cast<T>(top);
    const auto below = static_cast<T>(most > exponent ? most - exponent : 0);
    bytes[i] = static_cast<std::uint8_t>(below < static_cast<T>(last) ? below : static_cast<T>(last));
  }
  return Bytes(bytes);
}

// Bit `plane` of 64 integers.
inline std::uint64_t plane_of(const std::uint32_t* values, unsigned plane) {
  std::uint64_t word = 0;
#if defined(__AVX512F__)
  const __m512i bit = _mm512_set1_epi32(static_cast<int>(1u << plane));
  for (std::size_t i = 0; i < 4; ++i) {
    word |= std::uint64_t{mask_bits(_mm512_test_epi32_mask(_mm512_loadu_si512(values + 16 * i), bit))} << (16 * i);
  }
#elif defined(__AVX2__)
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(31 - plane));
  for (std::size_t i = 0; i < 8; ++i) {
    const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 8 * i));
    const int signs = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_sll_epi32(eight, shift)));
    word |= std::uint64_t{static_cast<std::uint32_t>(signs)} << (8 * i);
  }
#else
  for (std::size_t i = 0; i < kBlock; ++i) word |= std::uint64_t{values[i] >> plane & 1} << i;
#endif
  return word;
}

// Sets bit `plane` of those of 64 integers whose bits in `word` are set; it is not set in any of them.
inline void add_plane(std::uint32_t* values, unsigned plane, std::uint64_t word) {
  const std::uint32_t bit = 1u << plane;
#if defined(__AVX512F__)
  for (std::size_t i = 0; i < 4; ++i) {
    const __m512i old = _mm512_loadu_si512(values + 16 * i);
    const auto mask = static_cast<__mmask16>(word >> (16 * i));
    _mm512_storeu_si512(values + 16 * i,
                        _mm512_mask_or_epi32(old, mask, old, _mm512_set1_epi32(static_cast<int>(bit))));
  }
#elif defined(__AVX2__)
  const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  for (std::size_t i = 0; i < 8; ++i) {
    const __m256i eight = _mm256_set1_epi32(static_cast<int>(word >> (8 * i) & 0xff));
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(eight, places), places);
    auto* const at = reinterpret_cast<__m256i*>(values + 8 * i);
    const __m256i bits = _mm256_and_si256(set, _mm256_set1_epi32(static_cast<int>(bit)));
    _mm256_storeu_si256(at, _mm256_or_si256(_mm256_loadu_si256(at), bits));
  }
#else
  for (std::size_t i = 0; i < kBlock; ++i) values[i] |= static_cast<std::uint32_t>(word >> i & 1) << plane;
  (void)bit;
#endif
}

}  // namespace dtcomm::DTCOMM_ISA
