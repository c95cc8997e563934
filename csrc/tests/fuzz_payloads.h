// The cases of fuzz_payloads.cpp: codecs, sizes, floats and payloads, drawn from a seed.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "codec/layout.h"
#include "codec/validate.h"
#include "cpu/kernels.h"

namespace dtcomm::tests {

constexpr std::size_t kMostElements = 9000;  // more than two granules of any codec

constexpr int kFamilies = 12;

// A new family is a compile error here; kFamilies above counts it.
inline const char* family_name(Family family) {
  switch (family) {
    case Family::none:
      return "none";
    case Family::fp16:
      return "fp16";
    case Family::bf16:
      return "bf16";
    case Family::integer:
      return "integer";
    case Family::float8:
      return "float8";
    case Family::mx:
      return "mx";
    case Family::sign:
      return "sign";
    case Family::topk:
      return "topk";
    case Family::randk:
      return "randk";
    case Family::exact:
      return "exact";
    case Family::nvfp4:
      return "nvfp4";
    case Family::variable:
      return "intv";
  }
  return nullptr;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15ull;
    std::uint64_t h = state_;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ull;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
    return h ^ (h >> 31);
  }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(next() % n); }
  bool one_in(std::size_t n) { return below(n) == 0; }

 private:
  std::uint64_t state_;
};

inline void fill(Random& random, std::uint8_t* to, std::size_t size) {
  for (std::size_t i = 0; i < size; i += 8) {
    const std::uint64_t word = random.next();
    std::memcpy(to + i, &word, size - i < 8 ? size - i : 8);
  }
}

// A random codec of `family` that the kernels accept: fields are drawn until they are valid.
inline Codec random_codec(Random& random, Family family) {
  for (;;) {
    Codec codec;
    codec.family = family;
    const bool sparse = family == Family::topk || family == Family::randk;
    const std::uint64_t flips = random.next();
    codec.bits = static_cast<std::uint8_t>(random.below(9));
    codec.scale = static_cast<Scale>(flips & 1);
    codec.symmetric = (flips >> 1) & 1;
    codec.stochastic = (flips >> 2) & 1;
    codec.rotate = ((flips >> 3) & 3) == 0;
    codec.spikes = ((flips >> 5) & 3) == 0;
    codec.element = static_cast<Element>(random.below(9));
    codec.block = random.one_in(8) ? 0 : 16u << random.below(random.one_in(4) ? 9 : 4);
    if (family == Family::exact) codec.bits = flips & 1 ? 16 : 32;
    if (sparse) codec.kept = 1 + static_cast<std::uint32_t>(random.below(random.one_in(3) ? 4096 : 64));
    if (check_codec(codec).ok()) return codec;
  }
}

// A random number of elements: mostly small, so that many payloads are tried, else near the edges of granules, or any.
inline std::size_t random_numel(Random& random, const Codec& codec) {
  const std::size_t granule = granule_elements(codec);
  switch (random.below(16)) {
    case 0:
      return 1 + random.below(kMostElements);
    case 1: {
      const std::size_t near = granule * (1 + random.below(2)) + random.below(7);
      return near - 3 < kMostElements ? near - 3 : granule;
    }
    case 2:
    case 3:
      return 1 + random.below(1100);
    default:
      return 1 + random.below(random.one_in(2) ? 40 : 200);
  }
}

// The arguments of one call, without its memory.
struct Case {
  Codec codec;
  std::size_t numel = 0;
  DType dtype = DType::f32;
  std::size_t count = 1;
  bool local = false, residual = false, encode = false, stream = false;
  std::size_t position = 0, divisor = 1;
  std::uint64_t key = 0, offset = 0;
};

// Writes a payload: noise, a constant, or an encoding. Returns true if it is an undamaged encoding.
inline bool make_payload(Random& random, const Case& at, const Kernels& kernels, const std::uint8_t* floats,
                         std::uint8_t* to, std::size_t size) {
  const std::size_t kind = random.below(8);
  if (kind < 3) {
    fill(random, to, size);
    return false;
  }
  if (kind == 3) {
    constexpr std::uint8_t kBytes[] = {0x00, 0xff, 0x7f, 0x80, 0x01, 0xf0, 0x88, 0x7e};
    std::memset(to, kBytes[random.below(sizeof kBytes)], size);
    return false;
  }
  Combine call;
  call.local = floats;
  call.local_dtype = call.dtype = at.dtype;
  call.numel = at.numel;
  call.key = at.key;
  call.payload_out = to;
  kernels.combine(at.codec, call);
  if (kind == 4) return true;
  if (kind == 5) {  // a stretch of noise
    const std::size_t begin = random.below(size), length = 1 + random.below(size - begin);
    fill(random, to + begin, length);
    return false;
  }
  for (std::size_t flips = 1 + random.below(4); flips > 0; --flips) {
    to[random.below(size)] ^= static_cast<std::uint8_t>(1u << random.below(8));
  }
  return false;
}

// Writes floats in the case's dtype: mostly of ordinary magnitude, with some of every other kind.
inline void make_floats(Random& random, const Case& at, std::uint8_t* to) {
  fill(random, to, at.numel * size_of(at.dtype));
  if (random.one_in(4)) return;
  for (std::size_t i = 0; i < at.numel; ++i) {
    const std::uint64_t word = random.next();
    const auto bits = static_cast<std::uint32_t>((word & 0x807fffffu) | (110 + (word >> 32) % 24) << 23);
    if (at.dtype == DType::f32) {
      std::memcpy(to + 4 * i, &bits, 4);
    } else {
      const auto half = static_cast<std::uint16_t>(at.dtype == DType::bf16 ? bits >> 16 : (word & 0xbfff));
      std::memcpy(to + 2 * i, &half, 2);
    }
  }
}

// Weights, and others of which some elements differ by some units, or are random: bytes of n elements each.
inline std::pair<std::vector<std::uint8_t>, std::vector<std::uint8_t>> versions_of_weights(Random& random,
                                                                                           std::size_t n,
                                                                                           std::size_t size) {
  std::vector<std::uint8_t> old(n * size);
  fill(random, old.data(), old.size());
  if (random.one_in(2)) {  // few exponents
    for (std::size_t i = size - 1; i < old.size(); i += size) old[i] = static_cast<std::uint8_t>(0x3c - (old[i] & 3));
  }
  std::vector<std::uint8_t> fresh = old;
  const std::size_t changes = n == 0 ? 0 : random.one_in(4) ? random.below(n + 1) : random.below(n / 20 + 2);
  for (std::size_t i = 0; i < changes; ++i) {
    std::uint8_t* const element = fresh.data() + random.below(n) * size;
    std::uint32_t value = 0;
    std::memcpy(&value, element, size);
    value += random.one_in(8) ? static_cast<std::uint32_t>(random.next()) : random.one_in(2) ? 1u : ~0u;
    std::memcpy(element, &value, size);
  }
  return {old, fresh};
}

}  // namespace dtcomm::tests
