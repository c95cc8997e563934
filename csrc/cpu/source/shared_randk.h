// Sums of randk at positions that are the same on all ranks, so that ranks exchange only the values
// (LocalKernels in cpu/kernels.h).
#pragma once

#include "cpu/kernels.h"
#include "cpu/source/cast.h"
#include "cpu/source/fp_env.h"
#include "cpu/source/sparse_values.h"

namespace dtcomm::DTCOMM_ISA {

// Calls use(kept, at, n, value_at) for the granules of a tensor; `kept` has their positions.
template <class Use>
inline void each_granule(const Codec& codec, std::uint64_t key, std::uint64_t offset, std::size_t numel,
                         const Use& use) {
  const Layout layout = layout_of(codec, DType::f32);
  KeptElements kept;
  std::size_t value_at = 0;
  for (std::size_t at = 0; at < numel; at += layout.granule) {
    const std::size_t n = smaller(layout.granule, numel - at);
    kept.count = layout.kept_of(n);
    draw_positions(granule_key(key, offset + at), n, kept);
    use(kept, at, n, value_at);
    value_at += kept.count;
  }
}

// Adds the elements to the residual and returns true if all sums are finite; else changes nothing.
inline bool add_to_residual(const float* x, std::size_t n, float* residual) {
  alignas(kLine) float sum[kSparseGranule];
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    sum[i] =
        residual ? unaligned<float>(x)[i].value + unaligned<float>(residual)[i].value : unaligned<float>(x)[i].value;
    const std::uint32_t size = magnitude(sum[i]);
    largest = size > largest ? size : largest;
  }
  if (largest >= kInfinity32) return false;
  if (residual) __builtin_memcpy(residual, sum, n * sizeof(float));
  return true;
}

inline void gather_values(const Codec& codec, std::uint64_t key, std::uint64_t offset, const Contribution& from,
                          float* values, float* value_residual) {
  const ScopedFpEnv environment;
  alignas(kLine) float scratch[kSparseGranule];
  each_granule(
      codec, key, offset, from.numel, [&](KeptElements& kept, std::size_t at, std::size_t n, std::size_t value_at) {
        const auto* local = static_cast<const std::uint8_t*>(from.local) + at * size_of(from.dtype);
        const float* x = widen(from.dtype, local, n, scratch);
        float* const residual = from.residual ? from.residual + at : nullptr;
        for (std::size_t i = 0; residual && i < kept.count; ++i) {
          unaligned<float>(value_residual)[value_at + i].value = unaligned<float>(residual)[kept.position[i]].value;
        }
        const bool finite = add_to_residual(x, n, residual);
        const float nan = float_of(kNaN32);
        for (std::size_t i = 0; i < kept.count; ++i) {
          const float value = unaligned<float>(x)[kept.position[i]].value;
          unaligned<float>(values)[value_at + i].value = finite ? value : nan;
        }
      });
}

inline void scatter_values(const Codec& codec, std::uint64_t key, std::uint64_t offset, bool scaled,
                           const float* values, std::size_t numel, DType dtype, void* out) {
  const ScopedFpEnv environment;
  alignas(kLine) float scratch[kSparseGranule];
  each_granule(codec, key, offset, numel, [&](KeptElements& kept, std::size_t at, std::size_t n, std::size_t value_at) {
    const float factor = randk_factor(n, kept.count, !scaled);
    for (std::size_t i = 0; i < kept.count; ++i) {
      kept.value[i] = canonical(unaligned<float>(values)[value_at + i].value * factor);
    }
    if (kept.value[0] == kept.value[0]) {
      scatter(kept, n, scratch, false);
    } else {
      for (std::size_t i = 0; i < n; ++i) scratch[i] = float_of(kNaN32);
    }
    narrow(dtype, scratch, n, static_cast<std::uint8_t*>(out) + at * size_of(dtype));
  });
}

inline void restore_residual(const Codec& codec, std::uint64_t key, std::uint64_t offset, const float* value_residual,
                             std::size_t numel, float* residual) {
  each_granule(codec, key, offset, numel, [&](KeptElements& kept, std::size_t at, std::size_t, std::size_t value_at) {
    for (std::size_t i = 0; i < kept.count; ++i) {
      unaligned<float>(residual + at)[kept.position[i]].value = unaligned<float>(value_residual)[value_at + i].value;
    }
  });
}

}  // namespace dtcomm::DTCOMM_ISA
