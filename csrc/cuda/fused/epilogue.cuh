// The epilogue of a sum, in the pass that writes it: (sum + bias) + addend, in fp32 and rounded once, as cpu/epilogue.h
// does for payloads; or with the sum rounded before, as it does for sums that arrived uncompressed.
#pragma once

#include "cuda/fused/pipeline.cuh"

namespace dtcomm::cuda {

// Sums the elements of a section, whose first element is element `at` of the output, and applies the epilogue.
template <class Family, class Block>
DTCOMM_DEVICE void combine_with_epilogue(const Block& block, const FusedParams& fused, const RankState& state,
                                         std::uint64_t at, const KernelParams& params, const Family& family) {
  static_assert(!Family::kCanRotate, "no rotation to undo");
  const auto* addend =
      state.addend ? static_cast<const std::uint8_t*>(state.addend) + at * fused.element_bytes : nullptr;
  const bool addend_aligned = aligned_to(addend, kAlign);
  const std::uint64_t tiles = tile_count(block, params);
  DTCOMM_LOOP
  for (std::uint64_t tile = 0; tile < tiles; ++tile) {
    const Vec8Position pos = vec8_position(params, tile, block.thread(), block.threads());
    float x[kVec8], other[kVec8];
    sum_terms<kAnyCount, false>(block, params, family, *pos.shape, pos, x);
    if (fused.rounds_sum) {
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) x[j] = float_from_half(params.out_dtype, half_from_float(params.out_dtype, x[j]));
    }
    if (state.bias && pos.present > 0) {
      std::uint64_t column = (at + pos.first) % fused.features;
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) {
        if (j < pos.present) x[j] = x[j] + load_element(params.out_dtype, state.bias, column);
        if (++column == fused.features) column = 0;
      }
    }
    if (addend) {
      load_vec8(params.out_dtype, addend, pos.first, pos.present, addend_aligned, other);
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) x[j] = x[j] + other[j];
    }
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = canonical(x[j]);
    store_vec8(block, params.out_dtype, x, params.out, pos.first, pos.present, params.out_aligned, pos.whole);
  }
}

}  // namespace dtcomm::cuda
