// Integer codecs: a warp takes a block of elements at a time. Must give the bytes of cpu/source/integer.h.
#pragma once

#include "codec/integer.h"
#include "codec/layout.h"
#include "cuda/elements.cuh"

namespace dtcomm::cuda {

constexpr unsigned kWarp = 32, kWholeWarp = 0xffffffff;

struct Extent {
  std::uint32_t top;  // bits of the largest magnitude: NaN above Inf above every number
  float low, high;    // meaningless where the block holds a NaN
};

// Of `length` >= 1 elements from `at` on. Every lane starts from the first element and returns the same.
__device__ inline Extent measure(DType dtype, const void* x, std::size_t at, std::size_t length) {
  const float first = load(dtype, x, at);
  Extent extent{magnitude(first), first, first};
  for (std::size_t i = threadIdx.x % kWarp; i < length; i += kWarp) {
    const float value = load(dtype, x, at + i);
    extent.top = max(extent.top, magnitude(value));
    extent.low = value < extent.low ? value : extent.low;
    extent.high = value > extent.high ? value : extent.high;
  }
  for (unsigned reach = kWarp / 2; reach > 0; reach /= 2) {
    extent.top = max(extent.top, __shfl_xor_sync(kWholeWarp, extent.top, reach));
    const float low = __shfl_xor_sync(kWholeWarp, extent.low, reach);
    const float high = __shfl_xor_sync(kWholeWarp, extent.high, reach);
    extent.low = low < extent.low ? low : extent.low;
    extent.high = high > extent.high ? high : extent.high;
  }
  return extent;
}

__device__ inline void store_field(Scale type, float value, std::uint8_t* to, std::size_t i) {
  if (type == Scale::fp32) {
    reinterpret_cast<float*>(to)[i] = value;
  } else {
    reinterpret_cast<std::uint16_t*>(to)[i] = static_cast<std::uint16_t>(bits_of(value) >> 16);
  }
}

__device__ inline float load_field(Scale type, const std::uint8_t* from, std::size_t i) {
  if (type == Scale::fp32) return reinterpret_cast<const float*>(from)[i];
  return float_from_bf16(reinterpret_cast<const std::uint16_t*>(from)[i]);
}

struct Source {
  const void* x;
  DType dtype;
  std::uint64_t key, offset;  // stochastic rounding: offset is the index of x[0] in the caller's tensor
};

// Block `b` of the granule whose `n` elements start at `granule`.
__device__ inline void encode_block(const Codec& codec, const IntegerRules& rules, const Layout& layout,
                                    const Source& source, std::size_t granule, std::size_t n, std::size_t b,
                                    std::uint8_t* to) {
  const std::size_t begin = b * codec.block;
  const std::size_t length = n - begin < codec.block ? n - begin : codec.block;
  Extent extent = measure(source.dtype, source.x, granule + begin, length);
  float zero = 0.0f;
  if (!codec.symmetric && extent.top < kInfinity32) {
    zero = zero_of(rules, extent.low);
    extent.top = magnitude(extent.high - zero);
    zero = extent.top >= kInfinity32 ? 0.0f : zero;
  }
  const float scale = scale_of(rules, extent.top), inverse = inverse_of(scale);
  const unsigned lane = threadIdx.x % kWarp;
  if (lane == 0) {
    store_field(codec.scale, scale, to, b);
    if (!codec.symmetric) store_field(codec.scale, zero, to + layout.zeros_at(n), b);
  }
  const float lowest = codec.symmetric ? -rules.levels : 0.0f;
  std::uint8_t* codes = to + layout.codes_at(n) + begin;
  for (std::size_t i = lane; i < codec.block; i += kWarp) {
    std::int32_t code = 0;
    if (i < length && extent.top < kInfinity32) {
      const float t = (load(source.dtype, source.x, granule + begin + i) - zero) * inverse;
      const std::uint64_t index = source.offset + granule + begin + i;
      code = codec.stochastic
                 ? stochastic_code(t, lowest, rules.levels,
                                   uniform(make_stream(source.key, index), static_cast<std::uint32_t>(index)))
                 : nearest_code(t, lowest, rules.levels);
    }
    codes[i] = static_cast<std::uint8_t>(code);
  }
}

// Element `r` of a granule of `n` elements.
__device__ inline float decode_element(const Codec& codec, const Layout& layout, const std::uint8_t* from,
                                       std::size_t n, std::size_t r) {
  const std::size_t b = r / codec.block;
  const float scale = load_field(codec.scale, from, b);
  const std::uint8_t code = from[layout.codes_at(n) + r];
  if (codec.symmetric) return static_cast<float>(static_cast<std::int8_t>(code)) * scale;
  return load_field(codec.scale, from + layout.zeros_at(n), b) + static_cast<float>(code) * scale;
}

}  // namespace dtcomm::cuda
