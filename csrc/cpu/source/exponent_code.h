// Chooses the code for the exponents of a granule of the lossless codec.
#pragma once

#include "codec/lossless.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

#if defined(__AVX512F__)
constexpr std::size_t kExponentRun = 64;  // elements of a step
#elif defined(__AVX2__)
constexpr std::size_t kExponentRun = 32;
#else
constexpr std::size_t kExponentRun = 8;
#endif

// What is the same for all elements of a granule.
struct ExponentCode {
  unsigned width;  // bits of a code; kPlainExponents: there are no codes
  std::uint8_t base;
  std::size_t escapes;  // elements whose exponents are stored apart
};

// How many exponents have each value, and a range of values that has all of them.
struct ExponentCounts {
  int bottom = 255, top = 0;
  std::uint16_t of[256] = {};

  ExponentCounts(const std::uint8_t* exponents, std::size_t n) {
    const std::size_t done = count_whole(exponents, n);
    if (n - done > kExponentRun) {
      // Four tables, because neighbours are often equal and an increment waits for the one before it.
      std::uint16_t counts[4][256] = {};
      for (std::size_t i = done; i < n; ++i) ++counts[i % 4][exponents[i]];
      for (int e = 0; e < 256; ++e) {
        of[e] = static_cast<std::uint16_t>(counts[0][e] + counts[1][e] + counts[2][e] + counts[3][e]);
        if (of[e] == 0) continue;
        top = e;
        bottom = e < bottom ? e : bottom;
      }
      return;
    }
    for (std::size_t i = done; i < n; ++i) {
      const int e = exponents[i];
      ++of[e];
      top = e > top ? e : top;
      bottom = e < bottom ? e : bottom;
    }
  }

 private:
  // Counts the exponents of whole vectors if their values are few, which takes less than incrementing counters. Returns
  // how many exponents it counted.
  std::size_t count_whole([[maybe_unused]] const std::uint8_t* exponents, [[maybe_unused]] std::size_t n) {
#if defined(__AVX2__)
    constexpr int kFew = 32, kAtOnce = 4;
    const std::size_t whole = n / 32 * 32;
    const auto at = [=](std::size_t i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(exponents + i)); };
    __m256i least = _mm256_set1_epi8(-1), most = _mm256_setzero_si256();
    for (std::size_t i = 0; i < whole; i += 32) {
      least = _mm256_min_epu8(least, at(i));
      most = _mm256_max_epu8(most, at(i));
    }
    alignas(32) std::uint8_t lows[32], highs[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lows), least);
    _mm256_store_si256(reinterpret_cast<__m256i*>(highs), most);
    int low = 255, high = 0;
    for (int i = 0; i < 32; ++i) {
      low = lows[i] < low ? lows[i] : low;
      high = highs[i] > high ? highs[i] : high;
    }
    if (whole == 0 || high - low >= kFew) return 0;
    for (int e = low; e <= high; e += kAtOnce) {
      __m256i sums[kAtOnce] = {};  // bytes, which no granule's vectors overflow
      for (std::size_t i = 0; i < whole; i += 32) {
        const __m256i values = at(i);
        for (int j = 0; j < kAtOnce; ++j) {
          const __m256i same = _mm256_cmpeq_epi8(values, _mm256_set1_epi8(static_cast<char>(e + j)));
          sums[j] = _mm256_sub_epi8(sums[j], same);
        }
      }
      for (int j = 0; j < kAtOnce && e + j <= high; ++j) {
        const __m256i parts = _mm256_sad_epu8(sums[j], _mm256_setzero_si256());
        const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(parts), _mm256_extracti128_si256(parts, 1));
        of[e + j] = static_cast<std::uint16_t>(_mm_extract_epi16(pair, 0) + _mm_extract_epi16(pair, 4));
      }
    }
    bottom = low;
    top = high;
    return whole;
#else
    return 0;
#endif
  }
};
static_assert(kLosslessGranule / 32 <= 255, "the sums of count_whole are bytes");

// The code with the fewest bytes for these exponents; of equal ones that with the fewest bits, then the largest base.
inline ExponentCode best_code(const std::uint8_t* exponents, std::size_t n) {
  const ExponentCounts counts(exponents, n);
  const int top = counts.top, bottom = counts.bottom;
  std::uint16_t below[257];  // elements with smaller exponents, of those that windows end at
  constexpr int kWidestWindow = (1 << kWidestExponentCode) - 1;
  for (int e = bottom < kWidestWindow ? 0 : bottom - kWidestWindow; e <= bottom; ++e) below[e] = 0;
  for (int e = bottom; e <= top; ++e) below[e + 1] = static_cast<std::uint16_t>(below[e] + counts.of[e]);
  ExponentCode best{kPlainExponents, 0, 0};
  std::size_t least = n;
  for (unsigned width = 1; width <= kWidestExponentCode; ++width) {
    const int window = (1 << width) - 1;  // exponents that have codes: base and those below it
    const std::size_t planes = width * ((n + 7) / 8);
    const int last = bottom < window - 1 ? window - 1 : bottom;
    for (int e = top + 1; e <= last; ++e) below[e + 1] = static_cast<std::uint16_t>(n);
    for (int base = top < last ? last : top; base >= last; --base) {
      const std::size_t escapes = n - (below[base + 1] - below[base + 1 - window]);
      if (planes + escapes >= least) continue;
      least = planes + escapes;
      best = {width, static_cast<std::uint8_t>(base), escapes};
    }
  }
  return best;
}

}  // namespace dtcomm::DTCOMM_ISA
