// Sparse codecs: which elements of a granule are sent, and how their positions are stored. topk keeps the largest
// magnitudes and stores their positions; randk draws positions from the granule's key, and decoders draw them again.
// docs/reference/wire-format.md names the sources.
#pragma once

#include "codec/counter_rng.h"
#include "codec/float_bits.h"
#include "codec/layout.h"

namespace dtcomm {

// topk. A granule's elements are ordered by magnitude (as integers: NaN above Inf above numbers), equal ones by their
// index, and the first `count` are sent. With `threshold` the magnitude of the last of them and `ties` how many are
// sent of those that equal it, an element is sent if and only if this holds; `equals` counts those before it.
DTCOMM_HD bool is_sent(std::uint32_t size, std::uint32_t threshold, std::size_t equals, std::size_t ties) {
  return size > threshold || (size == threshold && equals < ties);
}

// The list of positions: 12 bits each, the low bits first, so that two of them share three bytes.
DTCOMM_HD std::uint32_t position_at(const std::uint8_t* list, std::size_t i) {
  const std::uint8_t* at = list + i * kPositionBits / 8;
  const std::uint32_t word = at[0] | static_cast<std::uint32_t>(at[1]) << 8;
  return i % 2 ? word >> 4 : word & 0xfffU;
}

// Writes positions 2 * pair and, if it exists, 2 * pair + 1 of `count`.
DTCOMM_HD void put_positions(std::uint8_t* list, std::size_t pair, std::size_t count, std::uint32_t first,
                             std::uint32_t second) {
  const bool both = 2 * pair + 1 < count;
  std::uint8_t* at = list + 3 * pair;
  const std::uint32_t word = first | (both ? second << kPositionBits : 0);
  at[0] = static_cast<std::uint8_t>(word);
  at[1] = static_cast<std::uint8_t>(word >> 8);
  if (both) at[2] = static_cast<std::uint8_t>(word >> 16);
}

DTCOMM_HD bool bit_at(const std::uint8_t* bitmap, std::size_t i) { return (bitmap[i / 8] >> i % 8 & 1) != 0; }

// randk. The key of the granule whose first element has `index` in the caller's tensor.
DTCOMM_HD std::uint64_t granule_key(std::uint64_t key, std::uint64_t index) {
  return absorb(absorb(key, kGoldenRatio), index);
}

// A permutation of [0, count): rounds of multiplying, adding and folding the upper half of the bits onto the lower,
// each a bijection of [0, 2^m), where 2^m is the smallest power of two that is at least `count`. They are repeated
// until the result is below `count`, which is then rotated by a random number, so that every position is equally
// likely.
constexpr int kPermutationRounds = 5;

struct Permutation {
  std::uint32_t multiply[kPermutationRounds], add[kPermutationRounds];
  std::uint32_t mask, shift, count, rotation;
};

DTCOMM_HD Permutation make_permutation(std::uint64_t granule_key, std::size_t count) {
  const std::uint32_t low = static_cast<std::uint32_t>(granule_key),
                      high = static_cast<std::uint32_t>(granule_key >> 32);
  Permutation permutation;
  std::uint32_t bits = 0;
  while ((std::size_t{1} << bits) < count) ++bits;
  permutation.mask = (1U << bits) - 1;
  permutation.shift = bits < 2 ? 1 : (bits + 1) / 2;
  permutation.count = static_cast<std::uint32_t>(count);
  for (std::uint32_t round = 0; round < kPermutationRounds; ++round) {
    const std::uint32_t word = mix32(low + mix32(high + round));
    permutation.multiply[round] = (word & 0xffffU) | 1U;
    permutation.add[round] = word >> 16;
  }
  const std::uint64_t last = mix32(low + mix32(high + kPermutationRounds));
  permutation.rotation = static_cast<std::uint32_t>((last * count) >> 32);
  return permutation;
}

// The image of `at` < 2^m in [0, 2^m).
DTCOMM_HD std::uint32_t permuted_in_range(const Permutation& permutation, std::uint32_t at) {
  for (int round = 0; round < kPermutationRounds; ++round) {
    at = (at * permutation.multiply[round] + permutation.add[round]) & permutation.mask;
    at ^= at >> permutation.shift;
  }
  return at;
}

DTCOMM_HD std::uint32_t rotated_position(const Permutation& permutation, std::uint32_t at) {
  at += permutation.rotation;
  return at >= permutation.count ? at - permutation.count : at;
}

// The position of value `i` < count. The loop ends, because the cycle of `i` returns to `i`.
DTCOMM_HD std::uint32_t permuted(const Permutation& permutation, std::uint32_t i) {
  do {
    i = permuted_in_range(permutation, i);
  } while (i >= permutation.count);
  return rotated_position(permutation, i);
}

// The factor of randk's values. It makes the decoding unbiased; with error feedback it is 1, and the residual holds in
// full what was not sent.
DTCOMM_HD float randk_factor(std::size_t elements, std::size_t kept, bool feedback) {
  return feedback ? 1.0f : static_cast<float>(elements) / static_cast<float>(kept);
}

}  // namespace dtcomm
