// Encodes and decodes the payloads of the lossless codec: fp32 and bf16, whose upper 16 bits are a sign, an exponent
// and 7 bits of the mantissa.
#pragma once

#include "codec/lossless.h"
#include "cpu/source/bit_planes.h"
#include "cpu/source/exponent_code.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

// Bit j of eight bytes, as a byte, and back.
inline std::uint8_t bit_of_eight(std::uint64_t bytes, unsigned j) {
  return static_cast<std::uint8_t>(((bytes >> j & 0x0101010101010101) * 0x0102040810204080) >> 56);
}

inline std::uint64_t eight_of_bits(std::uint8_t bits) {
  const std::uint64_t spread = std::uint64_t{bits} * 0x0101010101010101 & 0x8040201008040201;
  return (spread + 0x7f7f7f7f7f7f7f7f) >> 7 & 0x0101010101010101;
}

// The upper 16 bits of an element.
inline std::uint16_t upper_of(std::uint16_t element) { return element; }
inline std::uint16_t upper_of(std::uint32_t element) { return static_cast<std::uint16_t>(element >> 16); }

template <class Element>
constexpr int kExponentShift = 8 * sizeof(Element) - 9;

template <class Element>
inline Element with_exponent(Element element, std::uint8_t exponent) {
  constexpr Element kExponent = static_cast<Element>(Element{0xff} << kExponentShift<Element>);
  return static_cast<Element>((element & ~kExponent) |
                              static_cast<Element>(Element{exponent} << kExponentShift<Element>));
}

// Splits n elements into their exponents and, a byte each, their signs with the upper 7 bits of their mantissas; of
// fp32 the lower 16 bits are stored apart.
template <class Element>
inline void split(const void* from, std::size_t n, std::uint8_t* lower, std::uint8_t* signs, std::uint8_t* exponents) {
  const auto* x = unaligned<Element>(from);
  std::size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 32 <= n; i += 32) {
    __m512i upper;
    if constexpr (sizeof(Element) == 2) {
      upper = _mm512_loadu_si512(x + i);
    } else {
      const __m512i first = _mm512_loadu_si512(x + i), second = _mm512_loadu_si512(x + i + 16);
      const __m256i low = _mm512_maskz_cvtepi32_epi16(0xffff, first),
                    high = _mm512_maskz_cvtepi32_epi16(0xffff, second);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(lower + 2 * i), low);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(lower + 2 * i + 32), high);
      upper = _mm512_maskz_inserti64x4(
          0xff, _mm512_castsi256_si512(_mm512_maskz_cvtepi32_epi16(0xffff, _mm512_maskz_srli_epi32(0xffff, first, 16))),
          _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_maskz_srli_epi32(0xffff, second, 16)), 1);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(exponents + i),
                        _mm512_maskz_cvtepi16_epi8(~0U, _mm512_srli_epi16(upper, 7)));
    const __m512i shifted = _mm512_srli_epi16(upper, 8);
    const __m512i sign = _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x80), shifted, upper, 0xca);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(signs + i), _mm512_maskz_cvtepi16_epi8(~0U, sign));
  }
#elif defined(__AVX2__)
  const __m256i byte = _mm256_set1_epi16(0xff), sign_bit = _mm256_set1_epi16(0x80), mantissa = _mm256_set1_epi16(0x7f);
  // The packs work within halves of the vectors.
  const auto pack = [&](__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8); };
  for (; i + 32 <= n; i += 32) {
    __m256i upper[2];
    for (std::size_t j = 0; j < 2; ++j) {
      if constexpr (sizeof(Element) == 2) {
        upper[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 16 * j));
      } else {
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 16 * j));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 16 * j + 8));
        const __m256i half = _mm256_set1_epi32(0xffff);
        const __m256i low = _mm256_packus_epi32(_mm256_and_si256(first, half), _mm256_and_si256(second, half));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lower + 2 * i + 32 * j), _mm256_permute4x64_epi64(low, 0xd8));
        upper[j] = _mm256_permute4x64_epi64(
            _mm256_packus_epi32(_mm256_srli_epi32(first, 16), _mm256_srli_epi32(second, 16)), 0xd8);
      }
    }
    const auto exponent = [&](__m256i v) { return _mm256_and_si256(_mm256_srli_epi16(v, 7), byte); };
    const auto sign = [&](__m256i v) {
      return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(v, 8), sign_bit), _mm256_and_si256(v, mantissa));
    };
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(exponents + i), pack(exponent(upper[0]), exponent(upper[1])));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(signs + i), pack(sign(upper[0]), sign(upper[1])));
  }
#endif
  for (; i < n; ++i) {
    const Element element = x[i].value;
    const std::uint16_t upper = upper_of(element);
    exponents[i] = static_cast<std::uint8_t>(upper >> 7);
    signs[i] = static_cast<std::uint8_t>((upper >> 8 & 0x80) | (upper & 0x7f));
    if constexpr (sizeof(Element) == 4) unaligned<std::uint16_t>(lower)[i].value = static_cast<std::uint16_t>(element);
  }
}

// Stores the codes of n exponents as bit planes, and the exponents that have none. There is memory for kExponentRun
// exponents behind the last one, which is overwritten.
inline void store_exponents(std::uint8_t* exponents, std::size_t n, const ExponentCode& code, std::uint8_t* to) {
  const std::size_t plane = (n + 7) / 8;
  const auto escape = static_cast<std::uint8_t>((1U << code.width) - 1);
  std::uint8_t* escaped = to + code.width * plane;
  __builtin_memset(exponents + n, code.base, kExponentRun);
  std::size_t i = 0;
#if defined(__AVX512F__)
  const __m512i base = _mm512_set1_epi8(static_cast<char>(code.base)),
                most = _mm512_set1_epi8(static_cast<char>(escape));
  for (; i + 64 <= n; i += 64) {
    const __m512i codes = _mm512_maskz_min_epu8(~0ULL, _mm512_sub_epi8(base, _mm512_loadu_si512(exponents + i)), most);
    for (unsigned j = 0; j < code.width; ++j) {
      const std::uint64_t bits = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(static_cast<char>(1 << j)));
      __builtin_memcpy(to + j * plane + i / 8, &bits, sizeof bits);
    }
    std::uint64_t mask = _mm512_cmpeq_epi8_mask(codes, most);
#if defined(__AVX512VBMI2__)
    const int count = __builtin_popcountll(mask);
    const __m512i apart = _mm512_maskz_compress_epi8(mask, _mm512_loadu_si512(exponents + i));
    _mm512_mask_storeu_epi8(escaped, _bzhi_u64(~0ULL, static_cast<unsigned>(count)), apart);
    escaped += count;
#else
    for (; mask; mask &= mask - 1) *escaped++ = exponents[i + static_cast<std::size_t>(__builtin_ctzll(mask))];
#endif
  }
#elif defined(__AVX2__)
  const __m256i base = _mm256_set1_epi8(static_cast<char>(code.base));
  const __m256i most = _mm256_set1_epi8(static_cast<char>(escape));
  for (; i + 32 <= n; i += 32) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(exponents + i));
    const __m256i codes = _mm256_min_epu8(_mm256_sub_epi8(base, raw), most);
    for (unsigned j = 0; j < code.width; ++j) {
      const auto bits = static_cast<std::uint32_t>(
          _mm256_movemask_epi8(_mm256_sll_epi16(codes, _mm_cvtsi32_si128(static_cast<int>(7 - j)))));
      __builtin_memcpy(to + j * plane + i / 8, &bits, sizeof bits);
    }
    auto mask = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(codes, most)));
    for (; mask; mask &= mask - 1) *escaped++ = exponents[i + static_cast<std::size_t>(__builtin_ctz(mask))];
  }
#endif
  for (; i < n; i += 8) {
    std::uint8_t codes[8];
    for (std::size_t j = 0; j < 8; ++j) {
      const auto below = static_cast<std::uint8_t>(code.base - exponents[i + j]);
      codes[j] = below < escape ? below : escape;
    }
    std::uint64_t eight;
    __builtin_memcpy(&eight, codes, sizeof eight);
    for (unsigned j = 0; j < code.width; ++j) to[j * plane + i / 8] = bit_of_eight(eight, j);
    for (std::size_t j = 0; j < 8 && i + j < n; ++j) {
      if (codes[j] == escape) *escaped++ = exponents[i + j];
    }
  }
}

// Writes the payload and returns its bytes, at most lossless_bound.
template <class Element>
inline std::size_t encode_elements(const void* x, std::size_t numel, std::uint8_t* to) {
  constexpr std::size_t kSize = sizeof(Element);
  const std::size_t bound = lossless_bound(numel, kSize);
  const auto* from = static_cast<const std::uint8_t*>(x);
  std::uint8_t exponents[kLosslessGranule + kExponentRun];
  std::size_t bytes = kLosslessHead;
  LosslessMode mode = LosslessMode::coded;
  for (std::size_t at = 0; at < numel; at += kLosslessGranule) {
    const std::size_t n = smaller(kLosslessGranule, numel - at);
    std::uint8_t* const lower = to + bytes + kLosslessGranuleHead;
    std::uint8_t* const signs = lower + n * (kSize - 2);
    // All granules have these; the rest must fit, too.
    if (bytes + kLosslessGranuleHead + n * (kSize - 1) >= bound) {
      mode = LosslessMode::verbatim;
      break;
    }
    split<Element>(from + at * kSize, n, lower, signs, exponents);
    const ExponentCode code = best_code(exponents, n);
    const std::size_t granule = lossless_granule_bytes(n, kSize, code.width, code.escapes);
    if (bytes + granule >= bound) {
      mode = LosslessMode::verbatim;
      break;
    }
    const std::uint8_t head[kLosslessGranuleHead] = {static_cast<std::uint8_t>(code.width), code.base,
                                                     static_cast<std::uint8_t>(code.escapes),
                                                     static_cast<std::uint8_t>(code.escapes >> 8)};
    __builtin_memcpy(to + bytes, head, sizeof head);
    std::uint8_t* const out = signs + n;
    if (code.width == kPlainExponents) {
      __builtin_memcpy(out, exponents, n);
    } else {
      store_exponents(exponents, n, code, out);
    }
    bytes += granule;
  }
  if (mode == LosslessMode::verbatim) {
    bytes = bound;
    __builtin_memcpy(to + kLosslessHead, x, numel * kSize);
  }
  const std::uint64_t total = bytes;
  __builtin_memset(to, 0, kLosslessHead);
  __builtin_memcpy(to, &total, sizeof total);
  to[8] = static_cast<std::uint8_t>(mode);
  to[9] = kSize;
  return bytes;
}

inline std::size_t encode_lossless(const void* x, std::size_t numel, std::size_t size, std::uint8_t* to) {
  if (numel == 0) return 0;
  return size == 2 ? encode_elements<std::uint16_t>(x, numel, to) : encode_elements<std::uint32_t>(x, numel, to);
}

// One step of decoding: kExponentRun elements, or 8.
template <class Element>
inline void join_eight(const std::uint8_t* lower, const std::uint8_t* signs, std::uint64_t exponents, Element* to) {
  std::uint8_t each[8];
  __builtin_memcpy(each, &exponents, sizeof each);
  for (std::size_t j = 0; j < 8; ++j) {
    const auto upper = static_cast<std::uint16_t>((signs[j] & 0x80) << 8 | each[j] << 7 | (signs[j] & 0x7f));
    if constexpr (sizeof(Element) == 2) {
      to[j] = upper;
    } else {
      to[j] = static_cast<Element>(upper) << 16 | unaligned<std::uint16_t>(lower)[j].value;
    }
  }
}

#if defined(__AVX512VBMI__)
// Byte i / 2 of the first vector for even i, of the second one for odd i.
constexpr BytePattern bytes_of_both() {
  BytePattern pattern{};
  for (unsigned i = 0; i < kStep; ++i) pattern.of[i] = static_cast<std::uint8_t>(i / 2 + 64 * (i % 2));
  return pattern;
}
alignas(kLine) constexpr BytePattern kByteOfBoth = bytes_of_both();
#endif

#if defined(__AVX512F__)
template <class Element>
inline __attribute__((always_inline)) void join_run(const std::uint8_t* lower, const std::uint8_t* sign_bytes,
                                                    __m512i exponents, std::uint8_t* to) {
  __m512i signs = _mm512_loadu_si512(sign_bytes);
#if !defined(__AVX512VBMI__)
  // Quarters in an order in which the unpacking, which works within quarters, gives neighbours.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  signs = _mm512_maskz_permutexvar_epi64(0xff, order, signs);
  exponents = _mm512_maskz_permutexvar_epi64(0xff, order, exponents);
#endif
  const __m512i low = _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x7f), signs, _mm512_slli_epi16(exponents, 7), 0xca);
  const __m512i high = _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(0x80)), signs,
                                                 _mm512_srli_epi16(exponents, 1), 0xca);
#if defined(__AVX512VBMI__)
  const __m512i first = kByteOfBoth.vector(), second = _mm512_add_epi8(first, _mm512_set1_epi8(32));
  const __m512i upper[2] = {_mm512_maskz_permutex2var_epi8(~0ULL, low, first, high),
                            _mm512_maskz_permutex2var_epi8(~0ULL, low, second, high)};
#else
  const __m512i upper[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
#endif
  for (std::size_t j = 0; j < 2; ++j) {
    if constexpr (sizeof(Element) == 2) {
      _mm512_storeu_si512(to + 64 * j, upper[j]);
    } else {
      const auto* rest = reinterpret_cast<const __m256i*>(lower + 64 * j);
      const __m256i halves[2] = {_mm512_maskz_extracti64x4_epi64(0xff, upper[j], 0),
                                 _mm512_maskz_extracti64x4_epi64(0xff, upper[j], 1)};
      for (std::size_t k = 0; k < 2; ++k) {
        const __m512i word = _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, halves[k]), 16);
        const __m512i joined = _mm512_or_si512(word, _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(rest + k)));
        _mm512_storeu_si512(to + 128 * j + 64 * k, joined);
      }
    }
  }
}
#elif defined(__AVX2__)
template <class Element>
inline __attribute__((always_inline)) void join_run(const std::uint8_t* lower, const std::uint8_t* sign_bytes,
                                                    __m256i exponents, std::uint8_t* to) {
  // Quarters in an order in which the unpacking, which works within halves, gives neighbours.
  const __m256i signs =
      _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(sign_bytes)), 0xd8);
  exponents = _mm256_permute4x64_epi64(exponents, 0xd8);
  const __m256i mantissa = _mm256_set1_epi8(0x7f);
  const __m256i low = _mm256_or_si256(_mm256_and_si256(signs, mantissa),
                                      _mm256_andnot_si256(mantissa, _mm256_slli_epi16(exponents, 7)));
  const __m256i high = _mm256_or_si256(_mm256_andnot_si256(mantissa, signs),
                                       _mm256_and_si256(mantissa, _mm256_srli_epi16(exponents, 1)));
  const __m256i upper[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
  for (std::size_t j = 0; j < 2; ++j) {
    if constexpr (sizeof(Element) == 2) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32 * j), upper[j]);
    } else {
      const auto* rest = reinterpret_cast<const __m128i*>(lower + 32 * j);
      const __m128i halves[2] = {_mm256_castsi256_si128(upper[j]), _mm256_extracti128_si256(upper[j], 1)};
      for (std::size_t k = 0; k < 2; ++k) {
        const __m256i word = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves[k]), 16);
        const __m256i joined = _mm256_or_si256(word, _mm256_cvtepu16_epi32(_mm_loadu_si128(rest + k)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 64 * j + 32 * k), joined);
      }
    }
  }
}

// Bytes with bit j set where the bits of a plane are.
inline __attribute__((always_inline)) __m256i bytes_of_bits(std::uint32_t bits, unsigned j) {
  const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), places);
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
  return _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(1 << j)));
}
#endif

// Decodes n elements whose exponents have codes of Width bits. Returns whether exactly `escapes` codes stand for
// exponents that are stored apart. `behind`: the payload's bytes behind the granule.
template <class Element, unsigned Width>
inline bool decode_codes(const std::uint8_t* lower, const std::uint8_t* signs, const std::uint8_t* planes,
                         std::uint8_t base, std::size_t escapes, std::size_t n, [[maybe_unused]] std::size_t behind,
                         std::uint8_t* to) {
  const std::size_t plane = (n + 7) / 8;
  const std::uint8_t* escaped = planes + Width * plane;
  if (escapes > n) return false;
#if defined(__AVX512VBMI2__)
  std::uint8_t room[kLosslessGranule + kExponentRun];
  if (behind < kExponentRun) {  // steps read that many exponents at once
    __builtin_memcpy(room, escaped, escapes);
    __builtin_memset(room + escapes, 0, kExponentRun);
    escaped = room;
  }
#endif
  const std::uint8_t* const end = escaped + escapes;
  // The elements at i whose bits are set in `mask` get the next exponents.
  const auto put_escapes = [&](std::uint64_t mask, std::uint8_t* at) {
    if (end - escaped < __builtin_popcountll(mask)) return false;
    for (; mask; mask &= mask - 1) {
      auto* const element = unaligned<Element>(at) + __builtin_ctzll(mask);
      element->value = with_exponent<Element>(element->value, *escaped++);
    }
    return true;
  };
  std::size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 64 <= n; i += 64) {
    std::uint64_t mask = ~0ULL;
    __m512i exponents = _mm512_set1_epi8(static_cast<char>(base));
#pragma GCC unroll 4
    for (unsigned j = 0; j < Width; ++j) {
      std::uint64_t bits;
      __builtin_memcpy(&bits, planes + j * plane + i / 8, sizeof bits);
      mask &= bits;
      exponents = _mm512_mask_sub_epi8(exponents, bits, exponents, _mm512_set1_epi8(static_cast<char>(1 << j)));
    }
#if defined(__AVX512VBMI2__)
    // The next exponents go to the bytes of the mask without a branch, of which processors would predict few.
    const auto count = static_cast<std::ptrdiff_t>(__builtin_popcountll(mask));
    if (end - escaped < count) return false;
    exponents = _mm512_mask_expand_epi8(exponents, mask, _mm512_loadu_si512(escaped));
    escaped += count;
    join_run<Element>(lower + 2 * i, signs + i, exponents, to + i * sizeof(Element));
#else
    join_run<Element>(lower + 2 * i, signs + i, exponents, to + i * sizeof(Element));
    if (!put_escapes(mask, to + i * sizeof(Element))) return false;
#endif
  }
#elif defined(__AVX2__)
  for (; i + 32 <= n; i += 32) {
    std::uint32_t mask = ~0U;
    __m256i codes = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (unsigned j = 0; j < Width; ++j) {
      std::uint32_t bits;
      __builtin_memcpy(&bits, planes + j * plane + i / 8, sizeof bits);
      mask &= bits;
      codes = _mm256_or_si256(codes, bytes_of_bits(bits, j));
    }
    const __m256i exponents = _mm256_sub_epi8(_mm256_set1_epi8(static_cast<char>(base)), codes);
    join_run<Element>(lower + 2 * i, signs + i, exponents, to + i * sizeof(Element));
    if (!put_escapes(mask, to + i * sizeof(Element))) return false;
  }
#endif
  for (; i < n; i += 8) {
    std::uint8_t mask = 0xff;
    std::uint64_t codes = 0;
    for (unsigned j = 0; j < Width; ++j) {
      const std::uint8_t bits = planes[j * plane + i / 8];
      mask &= bits;
      codes |= eight_of_bits(bits) << j;
    }
    std::uint8_t exponents[8];
    __builtin_memcpy(exponents, &codes, sizeof codes);
    for (auto& exponent : exponents) exponent = static_cast<std::uint8_t>(base - exponent);
    __builtin_memcpy(&codes, exponents, sizeof codes);
    const std::size_t count = smaller(8, n - i);
    mask &= static_cast<std::uint8_t>(0xff >> (8 - count));
    std::uint8_t last_lower[16] = {}, last_signs[8] = {};
    const std::uint8_t *lower_at = lower + 2 * i, *signs_at = signs + i;
    if (count < 8) {
      if constexpr (sizeof(Element) == 4) __builtin_memcpy(last_lower, lower_at, 2 * count);
      __builtin_memcpy(last_signs, signs_at, count);
      lower_at = last_lower;
      signs_at = last_signs;
    }
    Element joined[8];
    join_eight<Element>(lower_at, signs_at, codes, joined);
    if (!put_escapes(mask, reinterpret_cast<std::uint8_t*>(joined))) return false;
    __builtin_memcpy(to + i * sizeof(Element), joined, count * sizeof(Element));
  }
  return escaped == end;
}

template <class Element>
inline void join_plain(const std::uint8_t* lower, const std::uint8_t* signs, const std::uint8_t* exponents,
                       std::size_t n, std::uint8_t* to) {
  auto* out = unaligned<Element>(to);
  for (std::size_t i = 0; i < n; ++i) {
    const auto upper = static_cast<std::uint16_t>((signs[i] & 0x80) << 8 | exponents[i] << 7 | (signs[i] & 0x7f));
    if constexpr (sizeof(Element) == 2) {
      out[i].value = upper;
    } else {
      out[i].value = static_cast<Element>(upper) << 16 | unaligned<std::uint16_t>(lower)[i].value;
    }
  }
}

template <class Element>
inline const char* decode_elements(const std::uint8_t* from, std::size_t bytes, std::size_t numel, std::uint8_t* to) {
  constexpr std::size_t kSize = sizeof(Element);
  if (bytes < kLosslessHead) return "is shorter than its head";
  std::uint64_t total;
  __builtin_memcpy(&total, from, sizeof total);
  if (total != bytes) return "has another length than its head states";
  if (from[9] != kSize) return "holds elements of another size";
  if (from[8] == static_cast<std::uint8_t>(LosslessMode::verbatim)) {
    if (bytes != lossless_bound(numel, kSize)) return "has another number of elements";
    __builtin_memcpy(to, from + kLosslessHead, numel * kSize);
    return nullptr;
  }
  if (from[8] != static_cast<std::uint8_t>(LosslessMode::coded)) return "has an unknown mode";
  std::size_t done = kLosslessHead;
  for (std::size_t at = 0; at < numel; at += kLosslessGranule) {
    const std::size_t n = smaller(kLosslessGranule, numel - at);
    if (bytes - done < kLosslessGranuleHead) return "ends within a granule";
    const unsigned width = from[done];
    const std::uint8_t base = from[done + 1];
    const std::size_t escapes = from[done + 2] | from[done + 3] << 8;
    if ((width < 1 || width > kWidestExponentCode) && width != kPlainExponents) return "has a granule of unknown width";
    if (width == kPlainExponents && escapes != 0) return "has a granule with escapes but without codes";
    const std::size_t granule = lossless_granule_bytes(n, kSize, width, escapes);
    if (bytes - done < granule) return "ends within a granule";
    const std::uint8_t* const lower = from + done + kLosslessGranuleHead;
    const std::uint8_t* const signs = lower + n * (kSize - 2);
    const std::uint8_t* const codes = signs + n;
    std::uint8_t* const out = to + at * kSize;
    const std::size_t behind = bytes - done - granule;
    bool valid = true;
    switch (width) {
      case 1:
        valid = decode_codes<Element, 1>(lower, signs, codes, base, escapes, n, behind, out);
        break;
      case 2:
        valid = decode_codes<Element, 2>(lower, signs, codes, base, escapes, n, behind, out);
        break;
      case 3:
        valid = decode_codes<Element, 3>(lower, signs, codes, base, escapes, n, behind, out);
        break;
      case 4:
        valid = decode_codes<Element, 4>(lower, signs, codes, base, escapes, n, behind, out);
        break;
      default:
        join_plain<Element>(lower, signs, codes, n, out);
    }
    if (!valid) return "has a granule with another number of escapes than its head states";
    done += granule;
  }
  return done == bytes ? nullptr : "goes on behind its last granule";
}

// nullptr, or what is wrong with the payload: then the output holds anything.
inline const char* decode_lossless(const std::uint8_t* from, std::size_t bytes, std::size_t numel, std::size_t size,
                                   void* to) {
  if (numel == 0) return bytes == 0 ? nullptr : "is not empty";
  auto* out = static_cast<std::uint8_t*>(to);
  return size == 2 ? decode_elements<std::uint16_t>(from, bytes, numel, out)
                   : decode_elements<std::uint32_t>(from, bytes, numel, out);
}

}  // namespace dtcomm::DTCOMM_ISA
