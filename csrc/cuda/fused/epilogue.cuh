// What follows a sum in the pass that writes it: (sum + bias) + addend, each in fp32 and rounded once, as
// cpu/epilogue.h has it of payloads; or with the sum rounded before, as it has it of sums that came uncompressed.
#pragma once

#include "cuda/fused/pipeline.cuh"

namespace dtcomm::cuda {

// The elements of a call, of which the first is element `at` of the output.
template <int Count, class Family, class Block>
DTCOMM_DEVICE void finish(const Block& block, const Fused& fused, const Seat& seat, std::uint64_t at, const Call& call,
                          const Family& family) {
  static_assert(!Family::kRotates, "blocks as they are summed");
  const auto* addend = seat.addend ? static_cast<const std::uint8_t*>(seat.addend) + at * fused.element_bytes : nullptr;
  const bool addend_wide = aligned_to(addend, kAlign);
  const std::uint64_t tiles = tiles_of(block, call);
  DTCOMM_LOOP
  for (std::uint64_t tile = 0; tile < tiles; ++tile) {
    const Place place = place_of(call, tile, block.thread(), block.threads());
    float x[kOctet], other[kOctet];
    sum_terms<Count>(block, call, family, *place.shape, place, x);
    if (fused.rounds) {
      DTCOMM_UNROLL
      for (int j = 0; j < kOctet; ++j) x[j] = float_from_half(call.out_dtype, half_from_float(call.out_dtype, x[j]));
    }
    if (seat.bias && place.present > 0) {
      std::uint64_t column = (at + place.first) % fused.features;
      DTCOMM_UNROLL
      for (int j = 0; j < kOctet; ++j) {
        if (j < place.present) x[j] = x[j] + load_element(call.out_dtype, seat.bias, column);
        if (++column == fused.features) column = 0;
      }
    }
    if (addend) {
      load_octet(call.out_dtype, addend, place.first, place.present, addend_wide, other);
      DTCOMM_UNROLL
      for (int j = 0; j < kOctet; ++j) x[j] = x[j] + other[j];
    }
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) x[j] = canonical(x[j]);
    store_octet(block, call.out_dtype, x, call.out, place.first, place.present, call.out_wide, place.whole);
  }
}

}  // namespace dtcomm::cuda
