// The kept values of a sparse granule: encoding and decoding them with their own codec, and scattering them to their
// positions.
#pragma once

#include "codec/sparse.h"
#include "cpu/source/granule.h"
#include "cpu/source/loops.h"

namespace dtcomm::DTCOMM_ISA {

// The elements of a granule that are sent. Lists are written and read by whole vectors.
struct KeptElements {
  std::size_t count;
  alignas(kLine) float value[kSparseGranule + kLine / sizeof(float)];
  std::uint16_t position[kSparseGranule];
};

// Encodes the values as granules of their own, the last one without padding; `index` is the counter of the first one's
// random number.
inline void encode_values(const CodecParams& params, const float* values, std::size_t count, std::uint64_t key,
                          std::uint64_t index, std::uint8_t* to) {
  const CodecParams nested(values_of(params.codec), DType::f32);
  const std::size_t granule = nested.layout.bytes(kValueGranule);
  for (; count > kValueGranule;
       count -= kValueGranule, values += kValueGranule, index += kValueGranule, to += granule) {
    encode_granule<false>(nested, values, kValueGranule, {key, index, false}, to);
  }
  std::uint8_t last[kValueGranule * sizeof(float) + kValueGranule];
  encode_granule<false>(nested, values, count, {key, index, false}, last);
  __builtin_memcpy(to, last, nested.layout.used(count));
}

inline void decode_values(const CodecParams& params, const std::uint8_t* from, std::size_t count, float* values) {
  const CodecParams nested(values_of(params.codec), DType::f32);
  const std::size_t granule = nested.layout.bytes(kValueGranule);
  for (std::size_t at = 0; at < count; at += kValueGranule, from += granule) {
    decode_granule<false>(nested, from, smaller(kValueGranule, count - at), values + at);
  }
  for (std::size_t i = 0; i < count; ++i) values[i] = canonical(values[i]);
}

#if defined(__AVX512F__)
// to = the values at the positions of a bitmap of n elements, zeros elsewhere and where there are no more values.
template <bool Stream>
inline void expand(KeptElements& kept, const std::uint8_t* bitmap, std::size_t n, float* to) {
  for (std::size_t i = 0; i < kLanes; ++i) kept.value[kept.count + i] = 0.0f;
  std::size_t at = 0;
  const auto vector_of = [&](__mmask16 bits) __attribute__((always_inline)) {
    const __m512 values = _mm512_loadu_ps(kept.value + smaller(at, kept.count));
    at += static_cast<std::size_t>(__builtin_popcount(bits));
    return _mm512_maskz_expand_ps(bits, values);
  };
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    std::uint16_t bits;
    __builtin_memcpy(&bits, bitmap + i / 8, sizeof bits);
    store<Stream>(to + i, reinterpret_cast<Floats>(vector_of(bits)));
  }
  if (i == n) return;
  const unsigned rest = (1U << (n - i)) - 1;
  const unsigned bits = bitmap[i / 8] | (n - i > 8 ? static_cast<unsigned>(bitmap[i / 8 + 1]) << 8 : 0);
  _mm512_mask_storeu_ps(to + i, static_cast<__mmask16>(rest), vector_of(static_cast<__mmask16>(bits & rest)));
}
#endif

// to = the values at their positions, zeros elsewhere. A streamed granule is made in L1 first: its lines are written
// once, and whole.
inline void scatter(const KeptElements& kept, std::size_t n, float* to, bool stream) {
  alignas(kLine) float granule[kSparseGranule];
  float* out = stream ? granule : to;
  __builtin_memset(out, 0, n * sizeof(float));
  for (std::size_t i = 0; i < kept.count; ++i) unaligned<float>(out)[kept.position[i]].value = kept.value[i];
  if (stream) stream_copy(to, granule, n * sizeof(float));
}

// to = sum + the values, or + 0 for elements without one; `to` may be `sum`.
inline void scatter_add(KeptElements& kept, std::size_t n, const float* sum, float* to) {
  for (std::size_t i = 0; i < kept.count; ++i) {
    kept.value[i] = canonical(unaligned<float>(sum)[kept.position[i]].value + kept.value[i]);
  }
  transform<Fp32>(sum, n, to, [](auto x, std::size_t) { return with_canonical_nan(x + 0.0f); });
  for (std::size_t i = 0; i < kept.count; ++i) unaligned<float>(to)[kept.position[i]].value = kept.value[i];
}

// The error of an encoding of `sum` that keeps these values.
inline void scatter_error(KeptElements& kept, std::size_t n, const float* sum, const ErrorTarget& target) {
  const float divisor = target.divisor;
  auto* to = unaligned<float>(target.residual);
  const auto* x = unaligned<float>(sum);
  const auto* before = unaligned<float>(target.old);
  for (std::size_t i = 0; i < kept.count; ++i) {
    const std::size_t at = kept.position[i];
    const float error = (x[at].value - kept.value[i]) * divisor;
    kept.value[i] = finite(error) ? error : before[at].value;
  }
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const float error = x[i].value * divisor, keep = before[i].value;
    to[i].value = finite(error) ? error : keep;
  }
  for (std::size_t i = 0; i < kept.count; ++i) to[kept.position[i]].value = kept.value[i];
}

// Draws randk's positions of the first kept.count values of a granule of n elements.
inline void draw_positions(std::uint64_t granule_key, std::size_t n, KeptElements& kept) {
  const Permutation permutation = make_permutation(granule_key, n);
  if (n == permutation.mask + std::size_t{1}) {  // every output is a position
    for (std::uint32_t i = 0; i < kept.count; ++i) {
      kept.position[i] = static_cast<std::uint16_t>(rotated_position(permutation, permuted_in_range(permutation, i)));
    }
  } else {
    for (std::uint32_t i = 0; i < kept.count; ++i)
      kept.position[i] = static_cast<std::uint16_t>(permuted(permutation, i));
  }
}

}  // namespace dtcomm::DTCOMM_ISA
