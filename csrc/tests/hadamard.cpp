// Compares the scalar Hadamard transform (codec/hadamard.h), which device kernels use, with every kernel of this CPU:
// the payload of a codec with a rotation equals the plain codec's payload of blocks that were rotated one by one, and
// it decodes accordingly.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "codec/codec.h"
#include "codec/counter_rng.h"
#include "codec/hadamard.h"
#include "cpu/kernels.h"

namespace {

using namespace dtcomm;

// Any bits, including NaN and Inf, or numbers of a few magnitudes.
float number(std::uint32_t seed, std::uint32_t i) {
  const std::uint32_t word = mix32(mix32(seed) + i);
  if (seed % 3 == 0) return float_of(word);
  return float_of((word & 0x803fffff) | (120U + word % 8) << 23);
}

std::vector<std::uint8_t> encode(const Kernels& kernels, const Codec& codec, const std::vector<float>& x) {
  std::vector<std::uint8_t> payload(wire_bytes(codec, x.size(), DType::f32));
  Combine call;
  call.local = x.data();
  call.numel = x.size();
  call.key = 7;
  call.payload_out = payload.data();
  kernels.combine(codec, call);
  return payload;
}

std::vector<float> decode(const Kernels& kernels, const Codec& codec, const std::vector<std::uint8_t>& payload,
                          std::size_t numel) {
  std::vector<float> x(numel);
  kernels.decode(codec, payload.data(), numel, DType::f32, x.data(), DType::f32, false);
  return x;
}

bool agrees(const Kernels& kernels, Codec codec, std::uint32_t seed) {
  std::vector<float> x(3 * codec.block);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = number(seed, static_cast<std::uint32_t>(i));
  codec.rotate = 1;
  const auto payload = encode(kernels, codec, x);
  const auto floats = decode(kernels, codec, payload, x.size());
  codec.rotate = 0;
  for (std::size_t at = 0; at < x.size(); at += codec.block) rotate_block(x.data() + at, codec.block, false);
  if (encode(kernels, codec, x) != payload) return false;
  auto expected = decode(kernels, codec, payload, x.size());
  for (std::size_t at = 0; at < x.size(); at += codec.block) rotate_block(expected.data() + at, codec.block, true);
  return std::memcmp(expected.data(), floats.data(), x.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
  for (const Kernels* const* kernels = all_kernels(); *kernels; ++kernels) {
    if (!(*kernels)->supported()) continue;
    for (std::uint32_t block = 16; block <= 4096; block *= 2) {
      for (std::uint32_t seed = 0; seed < 60; ++seed) {
        Codec codec;
        codec.family = Family::integer;
        codec.bits = 4;
        codec.block = block;
        codec.symmetric = seed & 1;
        codec.stochastic = seed >> 1 & 1;
        codec.spikes = seed >> 2 & 1;
        if (agrees(**kernels, codec, seed)) continue;
        std::fprintf(stderr, "FAILED: %s: blocks of %u, seed %u\n", (*kernels)->name, block, seed);
        return 1;
      }
    }
  }
  std::puts("Hadamard transforms agree");
  return 0;
}
