// Rotates blocks and rotates them back (codec/hadamard.h), in L1: as many stages in registers as fit, the rest in
// memory.
#pragma once

#include <utility>

#include "codec/hadamard.h"
#include "codec/layout.h"
#include "cpu/source/cast.h"

namespace dtcomm::DTCOMM_ISA {

typedef std::int32_t Words __attribute__((vector_size(kVector), may_alias));
using Lanes = std::make_index_sequence<kLanes>;

// The vectors that fit into registers beside the constants.
#if defined(__AVX512F__)
constexpr std::size_t kMaxVectors = 16;
#else
constexpr std::size_t kMaxVectors = 8;
#endif

struct RotationSigns {
  std::uint32_t bits[kLargestBlock];
};

constexpr RotationSigns rotation_signs() {
  RotationSigns signs{};
  for (std::uint32_t i = 0; i < kLargestBlock; ++i) signs.bits[i] = rotation_sign(i);
  return signs;
}

alignas(kLine) constexpr RotationSigns kRotationSigns = rotation_signs();

// Signs times norm, for blocks that fit into registers: one multiplication instead of two instructions saves a tenth of
// the time. The factors of a block of b elements start at index b - 16.
struct RotationFactors {
  float of[2 * kMaxVectors * kLanes - kSmallestBlock];
};

constexpr RotationFactors rotation_factors() {
  RotationFactors factors{};
  for (std::uint32_t block = kSmallestBlock; block <= kMaxVectors * kLanes; block *= 2) {
    const float norm = rotation_norm(block);
    for (std::uint32_t i = 0; i < block; ++i) {
      factors.of[block - kSmallestBlock + i] = rotation_sign(i) ? -norm : norm;
    }
  }
  return factors;
}

alignas(kLine) constexpr RotationFactors kRotationFactors = rotation_factors();

enum class Direction { in, back };

// Applies the signs of the elements from i on of a block.
inline __attribute__((always_inline)) Floats with_signs(Floats x, std::size_t i) {
  const auto signs = *reinterpret_cast<const Words*>(kRotationSigns.bits + i);
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(x) ^ signs);
}

inline __attribute__((always_inline)) Floats one_nan(Floats x) { return x == x ? x : Floats{} + float_of(kNaN32); }

// Whether the vectors may hold a NaN. Comparing two vectors at once and a branch that is rarely taken cost less than
// two comparisons and two selections.
template <std::size_t Count>
inline __attribute__((always_inline)) bool perhaps_nan([[maybe_unused]] const Floats (&v)[Count]) {
#if defined(__AVX512F__)
  unsigned found = 0;
  for (std::size_t i = 0; i < Count; i += 2) {
    const auto a = reinterpret_cast<__m512>(v[i]), b = reinterpret_cast<__m512>(v[i + 1 < Count ? i + 1 : i]);
    found |= _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
  }
  return found != 0;
#elif defined(__AVX2__)
  __m256 found = _mm256_setzero_ps();
  for (std::size_t i = 0; i < Count; i += 2) {
    const auto a = reinterpret_cast<__m256>(v[i]), b = reinterpret_cast<__m256>(v[i + 1 < Count ? i + 1 : i]);
    found = _mm256_or_ps(found, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
  }
  return _mm256_movemask_ps(found) != 0;
#else
  return Count > 0;  // always take the branch
#endif
}

// The butterflies within a vector. A product with 1 or -1 is exact, so a fused multiply-add rounds like the addition
// alone (1.3 times as fast as flipping the sign first).
template <std::size_t Half, std::size_t... I>
inline __attribute__((always_inline)) Floats butterflies(Floats x, std::index_sequence<I...>) {
  const Floats other = {x[I ^ Half]...};
#if defined(__AVX512F__)
  const Floats sign = {(I & Half ? -1.0f : 1.0f)...};
  return reinterpret_cast<Floats>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(sign), reinterpret_cast<__m512>(other)));
#elif defined(__FMA__)
  const Floats sign = {(I & Half ? -1.0f : 1.0f)...};
  return reinterpret_cast<Floats>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(sign), reinterpret_cast<__m256>(other)));
#else
  const Words sign = {(I & Half ? INT32_MIN : 0)...};
  return other + reinterpret_cast<Floats>(reinterpret_cast<Words>(x) ^ sign);
#endif
}

// All stages of Count vectors.
template <std::size_t Count>
inline __attribute__((always_inline)) void butterflies(Floats (&v)[Count]) {
  for (std::size_t i = 0; i < Count; ++i) {
    v[i] = butterflies<1>(v[i], Lanes{});
    v[i] = butterflies<2>(v[i], Lanes{});
    if constexpr (kLanes > 4) v[i] = butterflies<4>(v[i], Lanes{});
    if constexpr (kLanes > 8) v[i] = butterflies<8>(v[i], Lanes{});
  }
#pragma GCC unroll 4
  for (std::size_t half = 1; half < Count; half *= 2) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < Count; ++i) {
      if ((i & half) == 0) butterfly(v[i], v[i + half]);
    }
  }
}

// Whole blocks of Count vectors.
template <std::size_t Count, Direction Which, bool Stream>
inline void rotate_blocks(const float* x, std::size_t n, float* to, float scale) {
  [[maybe_unused]] const Floats norm = Floats{} + scale;
  [[maybe_unused]] const float* const factors = kRotationFactors.of + Count * kLanes - kSmallestBlock;
  for (std::size_t at = 0; at < n; at += Count * kLanes) {
    Floats v[Count];
    for (std::size_t i = 0; i < Count; ++i) {
      v[i] = load(x + at + i * kLanes) * (Which == Direction::in ? load(factors + i * kLanes) : norm);
    }
    butterflies(v);
    if constexpr (Which == Direction::back) {
      for (std::size_t i = 0; i < Count; ++i) v[i] = with_signs(v[i], i * kLanes);
      if (__builtin_expect(perhaps_nan(v), false)) {
        for (std::size_t i = 0; i < Count; ++i) v[i] = one_nan(v[i]);
      }
    }
    for (std::size_t i = 0; i < Count; ++i) store<Stream>(to + at + i * kLanes, v[i]);
  }
}

// The stages `half` and 2 * half of a block, or the first of them alone.
template <bool Two>
inline void butterflies_apart(float* x, std::size_t block, std::size_t half) {
  for (std::size_t at = 0; at < block; at += (Two ? 4 : 2) * half) {
    for (std::size_t i = at; i < at + half; i += kLanes) {
      Floats a = load(x + i), b = load(x + i + half);
      butterfly(a, b);
      if constexpr (Two) {
        Floats c = load(x + i + 2 * half), d = load(x + i + 3 * half);
        butterfly(c, d);
        butterfly(a, c);
        butterfly(b, d);
        store<false>(x + i + 2 * half, c);
        store<false>(x + i + 3 * half, d);
      }
      store<false>(x + i, a);
      store<false>(x + i + half, b);
    }
  }
}

// Whole blocks that are longer than the registers, by way of `work`, which may be `x` or `to` or both.
template <Direction Which, bool Stream>
inline void rotate_long_blocks(std::size_t block, const float* x, std::size_t n, float* to, float* work, float scale) {
  constexpr std::size_t kTile = kMaxVectors * kLanes;
  const Floats norm = Floats{} + scale;
  for (std::size_t at = 0; at < n; at += block, x += block, work += block, to += block) {
    for (std::size_t tile = 0; tile < block; tile += kTile) {
      Floats v[kMaxVectors];
      for (std::size_t i = 0; i < kMaxVectors; ++i) {
        v[i] = load(x + tile + i * kLanes);
        if constexpr (Which == Direction::in) v[i] = with_signs(v[i], tile + i * kLanes);
        v[i] = v[i] * norm;
      }
      butterflies(v);
      for (std::size_t i = 0; i < kMaxVectors; ++i) store<false>(work + tile + i * kLanes, v[i]);
    }
    std::size_t half = kTile;
    for (; 4 * half <= block; half *= 4) butterflies_apart<true>(work, block, half);
    if (half < block) butterflies_apart<false>(work, block, half);
    if constexpr (Which == Direction::back) {
      for (std::size_t i = 0; i < block; i += kLanes) store<Stream>(to + i, one_nan(with_signs(load(work + i), i)));
    }
  }
}

// Transforms whole blocks from `x` to `to`. Long blocks overwrite `work`, which may be `to` in the forward direction.
template <Direction Which, bool Stream>
inline void rotate_whole_blocks(std::size_t block, const float* x, std::size_t n, float* to, float* work) {
  const float norm = rotation_norm(static_cast<std::uint32_t>(block));
  if (kMaxVectors == 16 && block == 16 * kLanes) return rotate_blocks<kMaxVectors, Which, Stream>(x, n, to, norm);
  switch (block / kLanes) {
    case 1:
      return rotate_blocks<1, Which, Stream>(x, n, to, norm);
    case 2:
      return rotate_blocks<2, Which, Stream>(x, n, to, norm);
    case 4:
      return rotate_blocks<4, Which, Stream>(x, n, to, norm);
    case 8:
      return rotate_blocks<8, Which, Stream>(x, n, to, norm);
    default:
      return rotate_long_blocks<Which, Stream>(block, x, n, to, work, norm);
  }
}

// n floats into whole rotated blocks, the last one filled up with zeros. `to` has room for these and may be `x`.
inline void rotate(std::size_t block, const float* x, std::size_t n, float* to) {
  const std::size_t rest = n % block, whole = n - rest;
  rotate_whole_blocks<Direction::in, false>(block, x, whole, to, to);
  if (rest == 0) return;
  if (x != to) __builtin_memcpy(to + whole, x + whole, rest * sizeof(float));
  __builtin_memset(to + n, 0, (block - rest) * sizeof(float));
  rotate_whole_blocks<Direction::in, false>(block, to + whole, block, to + whole, to + whole);
}

// The n floats of whole rotated blocks. `to` may be `x`, and so may `work`, which has room for whole blocks; a streamed
// `to` is aligned to a line.
template <bool Stream>
inline void rotate_back(std::size_t block, const float* x, std::size_t n, float* to, float* work) {
  const std::size_t rest = n % block, whole = n - rest;
  rotate_whole_blocks<Direction::back, Stream>(block, x, whole, to, work);
  if (rest == 0) return;
  rotate_whole_blocks<Direction::back, false>(block, x + whole, block, work + whole, work + whole);
  if (work != to) __builtin_memcpy(to + whole, work + whole, rest * sizeof(float));
}

}  // namespace dtcomm::DTCOMM_ISA
