// A vec8, eight neighbouring elements of a thread, in registers and in memory; with sixteen-byte accesses where the
// address allows them.
#pragma once

#include "codec/cast.h"
#include "codec/counter_rng.h"
#include "core/types.h"
#include "cuda/warp.cuh"

namespace dtcomm::cuda {

#if defined(__CUDACC__)
typedef std::uint16_t Word16;
typedef std::uint32_t Word32;
typedef std::uint64_t Word64;
#else
typedef std::uint16_t __attribute__((may_alias)) Word16;
typedef std::uint32_t __attribute__((may_alias)) Word32;
typedef std::uint64_t __attribute__((may_alias)) Word64;
#endif

struct alignas(16) Quad {
  std::uint32_t word[4];
};

DTCOMM_DEVICE bool aligned_to(const void* address, unsigned bytes) {
  return (reinterpret_cast<std::uintptr_t>(address) & (bytes - 1)) == 0;
}

// Loads sixteen bytes that are not read again soon. The address must be aligned to sixteen; the emulator checks it.
DTCOMM_DEVICE Quad load_quad(const void* from) {
#if defined(__CUDA_ARCH__)
  const uint4 quad = __ldcs(static_cast<const uint4*>(from));
  return {{quad.x, quad.y, quad.z, quad.w}};
#else
  if (!aligned_to(from, 16)) __builtin_trap();
  Quad quad;
  __builtin_memcpy(&quad, from, sizeof quad);
  return quad;
#endif
}

DTCOMM_DEVICE void store_quad(const Quad& quad, void* to) {
#if defined(__CUDA_ARCH__)
  *static_cast<uint4*>(to) = make_uint4(quad.word[0], quad.word[1], quad.word[2], quad.word[3]);
#else
  if (!aligned_to(to, 16)) __builtin_trap();
  __builtin_memcpy(to, &quad, sizeof quad);
#endif
}

// Loads `Bytes` bytes (1, 2, 4 or 8), little-endian, in one access where the address is aligned to them. `Aligned`: it
// is known to be.
template <int Bytes, bool Aligned = false>
DTCOMM_DEVICE std::uint64_t load_bytes(const std::uint8_t* from) {
  if constexpr (Bytes == 1) {
    return *from;
  } else {
    if (Aligned || aligned_to(from, Bytes)) {
      if constexpr (Bytes == 2) return *reinterpret_cast<const Word16*>(from);
      if constexpr (Bytes == 4) return *reinterpret_cast<const Word32*>(from);
      if constexpr (Bytes == 8) return *reinterpret_cast<const Word64*>(from);
    }
    std::uint64_t value = 0;
    DTCOMM_UNROLL
    for (int i = 0; i < Bytes; ++i) value |= static_cast<std::uint64_t>(from[i]) << (8 * i);
    return value;
  }
}

template <int Bytes, bool Aligned = false>
DTCOMM_DEVICE void store_bytes(std::uint64_t value, std::uint8_t* to) {
  if constexpr (Bytes == 1) {
    *to = static_cast<std::uint8_t>(value);
  } else if (Aligned || aligned_to(to, Bytes)) {
    if constexpr (Bytes == 2) *reinterpret_cast<Word16*>(to) = static_cast<std::uint16_t>(value);
    if constexpr (Bytes == 4) *reinterpret_cast<Word32*>(to) = static_cast<std::uint32_t>(value);
    if constexpr (Bytes == 8) *reinterpret_cast<Word64*>(to) = value;
  } else {
    DTCOMM_UNROLL
    for (int i = 0; i < Bytes; ++i) to[i] = static_cast<std::uint8_t>(value >> (8 * i));
  }
}

// --- elements of floating dtypes ---

DTCOMM_DEVICE float float_from_half(DType dtype, std::uint32_t half) {
  const auto bits = static_cast<std::uint16_t>(half);
  return dtype == DType::f16 ? float_from_fp16(bits) : float_from_bf16(bits);
}

DTCOMM_DEVICE std::uint32_t half_from_float(DType dtype, float value) {
  return dtype == DType::f16 ? fp16_from_float(value) : bf16_from_float(value);
}

DTCOMM_DEVICE float load_element(DType dtype, const void* from, std::size_t i) {
  if (dtype == DType::f32) return float_of(static_cast<const Word32*>(from)[i]);
  return float_from_half(dtype, static_cast<const Word16*>(from)[i]);
}

DTCOMM_DEVICE void store_element(DType dtype, float value, void* to, std::size_t i) {
  if (dtype == DType::f32) {
    static_cast<Word32*>(to)[i] = bits_of(value);
  } else {
    static_cast<Word16*>(to)[i] = static_cast<std::uint16_t>(half_from_float(dtype, value));
  }
}

// A branch for all elements: inside a loop it would be one for each.
template <class Use>
DTCOMM_DEVICE void with_half_type(DType dtype, const Use& use) {
  if (dtype == DType::f16) {
    use(DType::f16);
  } else {
    use(DType::bf16);
  }
}

DTCOMM_DEVICE void floats_from_halves(DType dtype, const Quad& quad, float (&x)[kVec8]) {
  with_half_type(dtype, [&](DType half) {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = float_from_half(half, quad.word[j / 2] >> (16 * (j % 2)) & 0xffff);
  });
}

DTCOMM_DEVICE Quad halves_from_floats(DType dtype, const float (&x)[kVec8]) {
  Quad quad;
  with_half_type(dtype, [&](DType half) {
    DTCOMM_UNROLL
    for (int w = 0; w < 4; ++w) {
      quad.word[w] = half_from_float(half, x[2 * w]) | half_from_float(half, x[2 * w + 1]) << 16;
    }
  });
  return quad;
}

// Loads elements at .. at + 7 of a tensor, of which the first `present` exist; the others become +0. `at` is a multiple
// of 8; `wide`: the tensor is aligned to 16 bytes.
DTCOMM_DEVICE void load_vec8(DType dtype, const void* tensor, std::size_t at, int present, bool wide,
                             float (&x)[kVec8]) {
  if (wide && present == kVec8) {
    const auto* from = static_cast<const std::uint8_t*>(tensor) + at * size_of(dtype);
    const Quad low = load_quad(from);
    if (dtype == DType::f32) {
      const Quad high = load_quad(from + sizeof(Quad));
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) x[j] = float_of(j < 4 ? low.word[j] : high.word[j - 4]);
    } else {
      floats_from_halves(dtype, low, x);
    }
    return;
  }
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) x[j] = j < present ? load_element(dtype, tensor, at + j) : 0.0f;
}

// Stores eight fp32 of each lane of a warp whose vec8s are neighbours and all exist, to an address aligned to 16 bytes.
// The lanes of a pair exchange halves, so that each of the two stores fills whole sectors of 32 bytes. In place a lane
// stores where its neighbour loaded, so the warp synchronises before.
template <class Lanes>
DTCOMM_DEVICE void store_floats(const Lanes& lanes, const float (&x)[kVec8], float* to, std::size_t at) {
  const bool odd = (lanes.thread() & 1) != 0;
  Quad first, second;
  DTCOMM_UNROLL
  for (int j = 0; j < 4; ++j) {
    const float other = lanes.shuffle_xor(odd ? x[j] : x[4 + j], 1);
    first.word[j] = bits_of(odd ? other : x[j]);
    second.word[j] = bits_of(odd ? x[4 + j] : other);
  }
  float* pair = to + (odd ? at - kVec8 + 4 : at);
  lanes.sync_warp();
  store_quad(first, pair);
  store_quad(second, pair + kVec8);
}

// The inverse of load_vec8. `whole`: all elements of the warp exist (the same for all its lanes).
template <class Lanes>
DTCOMM_DEVICE void store_vec8(const Lanes& lanes, DType dtype, const float (&x)[kVec8], void* tensor, std::size_t at,
                              int present, bool wide, bool whole) {
  if (dtype == DType::f32 && wide && whole) {
    store_floats(lanes, x, static_cast<float*>(tensor), at);
  } else if (dtype != DType::f32 && wide && present == kVec8) {
    store_quad(halves_from_floats(dtype, x), static_cast<Word16*>(tensor) + at);
  } else {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      if (j < present) store_element(dtype, x[j], tensor, at + j);
    }
  }
}

// The random numbers of a vec8.
DTCOMM_DEVICE void uniform_vec8(std::uint64_t key, std::uint64_t index, float (&random)[kVec8]) {
  const auto low = static_cast<std::uint32_t>(index);
  Stream stream = make_stream(key, index);
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const std::uint32_t at = low + static_cast<std::uint32_t>(j);
    if (j > 0 && at == 0) stream = make_stream(key, index + static_cast<std::uint64_t>(j));  // the next 2^32
    random[j] = uniform(stream, at);
  }
}

}  // namespace dtcomm::cuda
