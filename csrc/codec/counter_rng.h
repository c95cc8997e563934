// The random numbers of stochastic rounding: a pure function of (key, index of the element in the caller's tensor),
// so that neither chunks nor threads nor the instruction set change a bit. 32-bit operations only: they exist as
// vectors everywhere.
#pragma once

#include "codec/float_bits.h"

namespace dtcomm {

DTCOMM_HD constexpr std::uint32_t mix32(std::uint32_t h) {
  h ^= h >> 16;
  h *= 0x7feb352dU;
  h ^= h >> 15;
  h *= 0x846ca68bU;
  h ^= h >> 16;
  return h;
}

// One stream of 2^32 numbers. The key enters before and between the rounds, so that two keys give unrelated
// streams and not one stream read from two places.
struct Stream {
  std::uint32_t before, between;
};

DTCOMM_HD Stream make_stream(std::uint64_t key, std::uint64_t index) {
  const std::uint32_t low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
  const std::uint32_t page = static_cast<std::uint32_t>(index >> 32);
  return {mix32(low + mix32(high + mix32(page + 0x9e3779b9U))), mix32(high + mix32(low + 0x85ebca6bU))};
}

// Uniform over the 2^24 multiples of 2^-24 in [0, 1); `index` is the low half of the element's index.
DTCOMM_HD float uniform(Stream stream, std::uint32_t index) {
  std::uint32_t h = index ^ stream.before;
  h ^= h >> 16;
  h *= 0x7feb352dU;
  h += stream.between;
  h ^= h >> 15;
  h *= 0x846ca68bU;
  h ^= h >> 16;
  return static_cast<float>(static_cast<std::int32_t>(h >> 8)) * 0x1p-24f;
}

// One step of a 64-bit hash (splitmix64's finaliser, Steele, Lea and Flood 2014).
DTCOMM_HD std::uint64_t absorb(std::uint64_t h, std::uint64_t word) {
  h += word;
  h ^= h >> 30;
  h *= 0xbf58476d1ce4e5b9ULL;
  h ^= h >> 27;
  h *= 0x94d049bb133111ebULL;
  h ^= h >> 31;
  return h;
}
constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15ULL;

// The key of one encoding: the call's seed, the rank that encodes, and the number of the rank's encoding (step).
DTCOMM_HD std::uint64_t mix_key(std::uint64_t seed, std::uint32_t rank, std::uint32_t step) {
  return absorb(absorb(absorb(seed, kGoldenRatio), rank), step);
}

}  // namespace dtcomm
