// Integer mixing (splitmix64's finaliser): fingerprints of operations and keys of encodings.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtcomm {

constexpr std::uint64_t mix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr std::uint64_t mix64(std::uint64_t a, std::uint64_t b) { return mix64(a ^ mix64(b)); }

// The key of stochastic rounding for what `rank` encodes into its `box` in a call with this seed; the counter is
// the element's index in the caller's tensor, so pieces and chunks share one key.
constexpr std::uint64_t encoding_key(std::uint64_t seed, int rank, int box) {
  return mix64(mix64(seed, static_cast<std::uint64_t>(rank)), static_cast<std::uint64_t>(box));
}

inline std::uint64_t hash_bytes(std::uint64_t state, const void* data, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) state = (state ^ p[i]) * 0x100000001b3ull;
  return mix64(state);
}

}  // namespace dtcomm
