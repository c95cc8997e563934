// Integer hashing (the finaliser of splitmix64), for fingerprints of operations and seeded orders.
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

inline std::uint64_t hash_bytes(std::uint64_t state, const void* data, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) state = (state ^ p[i]) * 0x100000001b3ull;
  return mix64(state);
}

}  // namespace dtcomm
