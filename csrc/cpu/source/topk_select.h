// Selects the k largest magnitudes of a granule, exactly, in L1. The k-th largest of the maxima of at least k groups of
// elements is a lower bound of the k-th largest element. Few other elements reach that bound, so the exact search runs
// over a small list of candidates.
#pragma once

#include "codec/sparse.h"
#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"

namespace dtcomm::DTCOMM_ISA {

constexpr std::size_t kRow = 256;      // a selection works on whole rows
constexpr std::size_t kGroups = 1024;  // of elements, at most
constexpr std::size_t kSlack = 16;     // lists are read and written by whole vectors

// How many sizes are at least `least`. Magnitudes fit signed words, which every instruction set compares.
inline std::size_t count_from(const std::int32_t* sizes, std::size_t n, std::int32_t least) {
  std::int32_t count = 0;
  for (std::size_t i = 0; i < n; ++i) count += sizes[i] >= least ? 1 : 0;
  return static_cast<std::size_t>(count);
}

struct Bound {
  std::int32_t least;
  std::size_t count;  // sizes that are `least` or more
};

// Bisection from a bound that at least k sizes reach to one that k to k + slack reach, or to the k-th largest itself
// if more elements equal it. Elements only select between two numbers, so there are no branches to predict.
inline Bound raise(Bound bound, const std::int32_t* sizes, std::size_t n, std::size_t k, std::size_t slack) {
  std::int32_t high = bound.least;
  for (std::size_t i = 0; i < n; ++i) high = sizes[i] > high ? sizes[i] : high;
  while (bound.least < high && bound.count > k + slack) {
    const std::int32_t middle = high - (high - bound.least) / 2;  // above the least
    const std::size_t reached = count_from(sizes, n, middle);
    const bool enough = reached >= k;
    bound.least = enough ? middle : bound.least;
    bound.count = enough ? reached : bound.count;
    high = enough ? high : middle - 1;
  }
  return bound;
}

struct Candidates {
  std::size_t count;
  alignas(kLine) std::int32_t size[kSparseGranule + kSlack];
  std::uint16_t position[kSparseGranule + kSlack];
};

#if defined(__AVX512F__)

// Finds the groups of sixteen with a candidate first, then the candidates in them, without branches on the data.
// `vector_at` returns sixteen elements and is called once for each sixteen, in order; then they are read from x.
template <class VectorAt>
inline __attribute__((always_inline)) void find_reaching(const float* x, std::size_t n, std::int32_t least,
                                                         const VectorAt& vector_at, Candidates& found) {
  alignas(kLine) std::uint16_t masks[kSparseGranule / 16];
  alignas(kLine) std::uint32_t hits[kSparseGranule / 16 + kSlack];
  const __m512i bound = _mm512_set1_epi32(least), strip = _mm512_set1_epi32(0x7fffffff);
  const __m512i count_up = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto sizes_at = [=](std::size_t i) { return _mm512_and_si512(_mm512_loadu_si512(x + 16 * i), strip); };
  const auto reach = [&](std::size_t i) __attribute__((always_inline)) {
    const __m512i size = _mm512_and_si512(reinterpret_cast<__m512i>(vector_at(16 * i)), strip);
    return _mm512_cmpge_epi32_mask(size, bound);
  };
  std::size_t hit = 0, count = 0;
  for (std::size_t i = 0; i < n / 16; i += 4) {
    const __mmask16 a = reach(i), b = reach(i + 1), c = reach(i + 2), d = reach(i + 3);
    const std::uint64_t four = _mm512_kunpackd(_mm512_kunpackw(d, c), _mm512_kunpackw(b, a));
    __builtin_memcpy(masks + i, &four, sizeof four);
  }
  for (std::size_t row = 0; row < n / 16; row += 16) {
    const __m512i some =
        _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_load_si256(reinterpret_cast<const __m256i*>(masks + row)));
    const __mmask16 any = _mm512_test_epi32_mask(some, some);
    const __m512i index = _mm512_add_epi32(count_up, _mm512_set1_epi32(static_cast<int>(row)));
    _mm512_storeu_si512(hits + hit, _mm512_maskz_compress_epi32(any, index));
    hit += static_cast<std::size_t>(__builtin_popcount(mask_bits(any)));
  }
  for (std::size_t h = 0; h < hit; ++h) {
    const std::size_t i = hits[h];
    const __m512i position = _mm512_add_epi32(count_up, _mm512_set1_epi32(static_cast<int>(16 * i)));
    _mm512_storeu_si512(found.size + count, _mm512_maskz_compress_epi32(masks[i], sizes_at(i)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(found.position + count),
                        _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_maskz_compress_epi32(masks[i], position)));
    count += static_cast<std::size_t>(__builtin_popcount(masks[i]));
  }
  found.count = count;
}

#else

// Which of x[0, 32) have a magnitude of `least` or more, a bit each.
inline std::uint32_t reaching(const float* x, std::int32_t least) {
  std::uint32_t mask = 0;
#if defined(__AVX2__)
  const __m256i below = _mm256_set1_epi32(least - 1), strip = _mm256_set1_epi32(0x7fffffff);
  for (int i = 0; i < 4; ++i) {
    const __m256i size = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * i)), strip);
    const int eight = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(size, below)));
    mask |= static_cast<std::uint32_t>(eight) << (8 * i);
  }
#else
  // Most groups have none: test all at once before testing each.
  std::int32_t largest = 0;
  for (int i = 0; i < 32; ++i) {
    const auto size = static_cast<std::int32_t>(magnitude(unaligned<float>(x)[i].value));
    largest = size > largest ? size : largest;
  }
  for (int i = 0; largest >= least && i < 32; ++i) {
    const auto size = static_cast<std::int32_t>(magnitude(unaligned<float>(x)[i].value));
    mask |= static_cast<std::uint32_t>(size >= least ? 1 : 0) << i;
  }
#endif
  return mask;
}

// The same for 32 elements at a time.
template <class VectorAt>
inline __attribute__((always_inline)) void find_reaching(const float* x, std::size_t n, std::int32_t least,
                                                         const VectorAt& vector_at, Candidates& found) {
  std::size_t count = 0;
  for (std::size_t at = 0; at < n; at += 32) {
    for (std::size_t i = at; i < at + 32; i += kLanes) vector_at(i);
    for (std::uint32_t mask = reaching(x + at, least); mask; mask &= mask - 1) {
      const std::size_t i = at + static_cast<std::size_t>(__builtin_ctz(mask));
      found.size[count] = static_cast<std::int32_t>(magnitude(unaligned<float>(x)[i].value));
      found.position[count++] = static_cast<std::uint16_t>(i);
    }
  }
  found.count = count;
}

#endif

typedef std::int32_t Sizes __attribute__((vector_size(kVector)));
typedef std::int32_t LooseSizes __attribute__((vector_size(kVector), aligned(1), may_alias));

// Maxima of `groups` (kRow or more) interleaved groups of the elements, a few registers of groups at a time.
inline void group_maxima(const float* x, std::size_t n, std::size_t groups, std::int32_t* maxima) {
  constexpr std::size_t kWide = 4;
  const Sizes strip = Sizes{} + 0x7fffffff;
  for (std::size_t g = 0; g < groups; g += kWide * kLanes) {
    Sizes most[kWide] = {};
    for (std::size_t at = g; at < n; at += groups) {
      for (std::size_t i = 0; i < kWide; ++i) {
        const Sizes size = *reinterpret_cast<const LooseSizes*>(x + at + i * kLanes) & strip;
        most[i] = size > most[i] ? size : most[i];
      }
    }
    for (std::size_t i = 0; i < kWide; ++i) *reinterpret_cast<LooseSizes*>(maxima + g + i * kLanes) = most[i];
  }
}

// The same for x + residual, in kRow groups and in memory order, as both terms come from memory.
template <class Element>
inline void sum_maxima(const void* x, const float* residual, std::size_t n, std::int32_t* maxima) {
  constexpr std::size_t kVectors = kRow / kLanes;
  const Sizes strip = Sizes{} + 0x7fffffff;
  Sizes most[kVectors] = {};
  for (std::size_t at = 0; at < n; at += kRow) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kVectors; ++i) {
      const Floats sum = many<Element>(x, at + i * kLanes) + load(residual + at + i * kLanes);
      const Sizes size = reinterpret_cast<Sizes>(sum) & strip;
      most[i] = size > most[i] ? size : most[i];
    }
  }
  for (std::size_t i = 0; i < kVectors; ++i) *reinterpret_cast<LooseSizes*>(maxima + i * kLanes) = most[i];
}

// A magnitude that at least k <= groups elements reach, and few more.
inline std::int32_t reached_by(const std::int32_t* maxima, std::size_t groups, std::size_t k) {
  Bound bound{maxima[0], groups};
  for (std::size_t g = 0; g < groups; ++g) bound.least = maxima[g] < bound.least ? maxima[g] : bound.least;
  return raise(bound, maxima, groups, k, k / 4).least;
}

inline std::int32_t reached_by(const float* x, std::size_t n, std::size_t k) {
  // Groups of 16 if few elements are kept, else of 4; if most are kept, groups gain nothing.
  const std::size_t groups = 3 * k <= kRow ? kRow : kGroups;
  if (2 * k > groups || n % groups != 0 || n == groups) return 0;
  alignas(kLine) std::int32_t maxima[kGroups];
  group_maxima(x, n, groups, maxima);
  return reached_by(maxima, groups, k);
}

// An element is sent if its size is above `size`, or equal to it and one of the first `ties` such elements.
struct Threshold {
  std::int32_t size;
  std::size_t ties;
};

// The threshold of the k largest: all elements that reach `least`, at least k, are candidates.
inline Threshold threshold_of(Candidates& found, std::size_t k, std::int32_t least) {
  const std::size_t vectors = (found.count + kSlack - 1) / kSlack * kSlack;
  for (std::size_t i = 0; i < kSlack; ++i) found.size[found.count + i] = -1;
  const Bound bound = raise({least, found.count}, found.size, vectors, k, 0);
  std::size_t ties = k;  // no limit, unless more elements than are wanted equal the last one
  if (bound.count > k) {
    for (std::size_t i = 0; i < found.count; ++i) ties -= found.size[i] > bound.least ? 1 : 0;
  }
  return {bound.least, ties};
}

// The positions of the k largest of the candidates, ascending.
inline void select_from(Candidates& found, std::size_t k, std::int32_t least, std::uint16_t* positions) {
  const Threshold threshold = threshold_of(found, k, least);
  std::size_t taken = 0, equals = 0;
  for (std::size_t i = 0; taken < k; ++i) {
    const auto size = static_cast<std::uint32_t>(found.size[i]), last = static_cast<std::uint32_t>(threshold.size);
    positions[taken] = found.position[i];
    taken += is_sent(size, last, equals, threshold.ties) ? 1 : 0;
    equals += size == last ? 1 : 0;
  }
}

// The positions of the k largest of n elements. n is whole rows.
inline void select(const float* x, std::size_t n, std::size_t k, const PrefetchRange& ahead, std::uint16_t* positions) {
  const std::int32_t least = reached_by(x, n, k);
  Candidates found;
  const auto vector_at = [&](std::size_t i) __attribute__((always_inline)) {
    if (i % 64 == 0) prefetch<2>(ahead, i);
    return load(x + i);
  };
  find_reaching(x, n, least, vector_at, found);
  select_from(found, k, least, positions);
}

// The same for the sum of x and a residual, which becomes the sum; `least` is reached by k or more of it.
template <class Element>
inline void select_sum(const void* x, float* residual, std::size_t n, std::size_t k, std::int32_t least,
                       const EncodeArgs& args, std::uint16_t* positions) {
  Candidates found;
  const auto vector_at = [&](std::size_t i) __attribute__((always_inline)) {
    if (i % 64 == 0) {
      prefetch<2>(args.local, i);
      prefetch<2>(args.residual, i);
    }
    const Floats sum = many<Element>(x, i) + load(residual + i);
    store<false>(residual + i, sum);
    return sum;
  };
  find_reaching(residual, n, least, vector_at, found);
  select_from(found, k, least, positions);
}

#if defined(__AVX512F__)
// The k largest of n elements as a bitmap of n bits, and their values. n is whole rows; `values` has kSlack more.
inline void select_bitmap(const float* x, std::size_t n, std::size_t k, const PrefetchRange& ahead,
                          std::uint8_t* bitmap, float* values) {
  const std::int32_t least = reached_by(x, n, k);
  Candidates found;
  const auto vector_at = [&](std::size_t i) __attribute__((always_inline)) {
    if (i % 64 == 0) prefetch<2>(ahead, i);
    return load(x + i);
  };
  find_reaching(x, n, least, vector_at, found);
  const Threshold threshold = threshold_of(found, k, least);
  const __m512i last = _mm512_set1_epi32(threshold.size), strip = _mm512_set1_epi32(0x7fffffff);
  std::size_t taken = 0, ties = threshold.ties;
  for (std::size_t i = 0; i < n; i += kLanes) {
    const __m512i bits = _mm512_loadu_si512(x + i), size = _mm512_and_si512(bits, strip);
    const std::uint32_t above = mask_bits(_mm512_cmpgt_epi32_mask(size, last));
    std::uint32_t equal = mask_bits(_mm512_cmpeq_epi32_mask(size, last));
    if (__builtin_expect(equal != 0, 0)) {  // the first `ties` of them
      equal = _pdep_u32((1U << smaller(ties, kLanes)) - 1, equal);
      ties -= static_cast<std::size_t>(__builtin_popcount(equal));
    }
    const std::uint32_t sent = above | equal;
    const auto half = static_cast<std::uint16_t>(sent);
    __builtin_memcpy(bitmap + i / 8, &half, sizeof half);
    _mm512_storeu_si512(values + taken, _mm512_maskz_compress_epi32(half, bits));
    taken += static_cast<std::size_t>(__builtin_popcount(sent));
  }
}
#endif

// Elements in whole rows. Zeros at the end come after every element: k <= n, so that none of them is taken.
struct PaddedRows {
  alignas(kLine) float room[kSparseGranule];
  const float* x;
  std::size_t n;

  PaddedRows(const float* from, std::size_t count) : x(from), n((count + kRow - 1) / kRow * kRow) {
    if (n == count) return;
    __builtin_memcpy(room, from, count * sizeof(float));
    __builtin_memset(room + count, 0, (n - count) * sizeof(float));
    x = room;
  }
};

}  // namespace dtcomm::DTCOMM_ISA
