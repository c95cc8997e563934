// Comparisons of 64 elements at a time, whose results are the bits of a word, and the bit planes of 64 integers.
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

#if defined(__AVX512F__)

template <class T>
struct Block {
  static constexpr std::size_t kParts = sizeof(T);
  __m512i part[kParts];

  explicit Block(const T* from) {
    for (std::size_t i = 0; i < kParts; ++i) part[i] = _mm512_loadu_si512(from + i * (kBlock / kParts));
  }
  Block operator&(T mask) const {
    Block masked = *this;
    const __m512i bits = sizeof(T) == 1   ? _mm512_set1_epi8(static_cast<char>(mask))
                         : sizeof(T) == 2 ? _mm512_set1_epi16(static_cast<short>(mask))
                                          : _mm512_set1_epi32(static_cast<int>(mask));
    for (auto& value : masked.part) value = _mm512_and_si512(value, bits);
    return masked;
  }
  // The bits of the elements that differ.
  std::uint64_t differs(const Block& other) const {
    if constexpr (sizeof(T) == 1) return _mm512_cmpneq_epi8_mask(part[0], other.part[0]);
    if constexpr (sizeof(T) == 2) {
      return _mm512_cmpneq_epi16_mask(part[0], other.part[0]) |
             std::uint64_t{_mm512_cmpneq_epi16_mask(part[1], other.part[1])} << 32;
    }
    if constexpr (sizeof(T) == 4) {
      std::uint64_t word = 0;
      for (std::size_t i = 0; i < kParts; ++i) {
        word |= std::uint64_t{mask_bits(_mm512_cmpneq_epi32_mask(part[i], other.part[i]))} << (16 * i);
      }
      return word;
    }
  }
  // The bits of the elements below `limit`.
  std::uint64_t below(T limit) const {
    if constexpr (sizeof(T) == 1) return _mm512_cmplt_epu8_mask(part[0], _mm512_set1_epi8(static_cast<char>(limit)));
    if constexpr (sizeof(T) == 2) {
      const __m512i limits = _mm512_set1_epi16(static_cast<short>(limit));
      return _mm512_cmplt_epu16_mask(part[0], limits) | std::uint64_t{_mm512_cmplt_epu16_mask(part[1], limits)} << 32;
    }
    if constexpr (sizeof(T) == 4) {
      const __m512i limits = _mm512_set1_epi32(static_cast<int>(limit));
      std::uint64_t word = 0;
      for (std::size_t i = 0; i < kParts; ++i) {
        word |= std::uint64_t{mask_bits(_mm512_cmplt_epu32_mask(part[i], limits))} << (16 * i);
      }
      return word;
    }
  }
};

#elif defined(__AVX2__)

template <class T>
struct Block {
  static constexpr std::size_t kParts = 2 * sizeof(T);
  __m256i part[kParts];

  explicit Block(const T* from) {
    for (std::size_t i = 0; i < kParts; ++i) {
      part[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * (kBlock / kParts)));
    }
  }
  static __m256i all(T value) {
    return sizeof(T) == 1   ? _mm256_set1_epi8(static_cast<char>(value))
           : sizeof(T) == 2 ? _mm256_set1_epi16(static_cast<short>(value))
                            : _mm256_set1_epi32(static_cast<int>(value));
  }
  Block operator&(T mask) const {
    Block masked = *this;
    for (auto& value : masked.part) value = _mm256_and_si256(value, all(mask));
    return masked;
  }
  // The bits of the elements for which `compare` gives ones.
  template <class Compare>
  static std::uint64_t bits(const Compare& compare) {
    std::uint64_t word = 0;
    for (std::size_t half = 0; half < 2; ++half) {
      __m256i bytes;
      if constexpr (sizeof(T) == 1) bytes = compare(half);
      if constexpr (sizeof(T) == 2) {
        bytes = _mm256_packs_epi16(compare(2 * half), compare(2 * half + 1));
        bytes = _mm256_permute4x64_epi64(bytes, 0xd8);
      }
      if constexpr (sizeof(T) == 4) {
        const __m256i low = _mm256_packs_epi32(compare(4 * half), compare(4 * half + 1));
        const __m256i high = _mm256_packs_epi32(compare(4 * half + 2), compare(4 * half + 3));
        bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      }
      word |= std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes))} << (32 * half);
    }
    return word;
  }
  static __m256i equal(__m256i a, __m256i b) {
    return sizeof(T) == 1   ? _mm256_cmpeq_epi8(a, b)
           : sizeof(T) == 2 ? _mm256_cmpeq_epi16(a, b)
                            : _mm256_cmpeq_epi32(a, b);
  }
  static __m256i greater(__m256i a, __m256i b) {
    return sizeof(T) == 1   ? _mm256_cmpgt_epi8(a, b)
           : sizeof(T) == 2 ? _mm256_cmpgt_epi16(a, b)
                            : _mm256_cmpgt_epi32(a, b);
  }
  std::uint64_t differs(const Block& other) const {
    return ~bits([&](std::size_t i) { return equal(part[i], other.part[i]); });
  }
  // Elements and limit have no sign bit, so that signed comparisons serve.
  std::uint64_t below(T limit) const {
    return bits([&](std::size_t i) { return greater(all(limit), part[i]); });
  }
};

#else

template <class T>
struct Block {
  T element[kBlock];

  explicit Block(const T* from) { __builtin_memcpy(element, from, sizeof element); }
  Block operator&(T mask) const {
    Block masked = *this;
    for (auto& value : masked.element) value = static_cast<T>(value & mask);
    return masked;
  }
  // The bits of 64 bytes that are 0 or 255.
  static std::uint64_t bits(const std::uint8_t* bytes) {
#if defined(DTCOMM_NEON)
    const uint8x16_t places = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    const auto part = [&](std::size_t i) { return vandq_u8(vld1q_u8(bytes + 16 * i), places); };
    const uint8x16_t halves = vpaddq_u8(vpaddq_u8(part(0), part(1)), vpaddq_u8(part(2), part(3)));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(halves, halves)), 0);
#else
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < kBlock; i += 8) {
      std::uint64_t eight;
      __builtin_memcpy(&eight, bytes + i, sizeof eight);
      word |= (eight & 0x0101010101010101) * 0x0102040810204080 >> 56 << i;
    }
    return word;
#endif
  }
  std::uint64_t differs(const Block& other) const {
    if (__builtin_memcmp(element, other.element, sizeof element) == 0) return 0;
    std::uint8_t bytes[kBlock];
    for (std::size_t i = 0; i < kBlock; ++i) bytes[i] = element[i] != other.element[i] ? 0xff : 0;
    return bits(bytes);
  }
  std::uint64_t below(T limit) const {
    std::uint8_t bytes[kBlock];
    for (std::size_t i = 0; i < kBlock; ++i) bytes[i] = element[i] < limit ? 0xff : 0;
    return bits(bytes);
  }
};

#endif

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
