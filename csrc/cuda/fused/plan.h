// From a collective as it is stated to what a launch is handed. Host code alone, for the device's launch and for the
// emulator.
#pragma once

#include "cuda/fused/program_step.cuh"
#include "cuda/make_params.h"

namespace dtcomm::cuda {

// Of a call that why_not() has nothing against, and that is not a program.
Fused plan_fused(const FusedCall& call);

// The launches of a program, in order; of a call that why_not() has nothing against.
std::vector<Step> plan_steps(const FusedCall& call);
std::string why_no_steps(const FusedCall& call);
// Whether a rank that is here sums anything, and whether the i-th of them reads its input.
bool sums(const FusedCall& call);
bool reads_input(const FusedCall& call, int i);

// A rank's tensors in a call, whatever else it does.
Call whole_call(const FusedCall& call, const Share& share);

// Granules of a chunk that a block takes at a time.
std::uint32_t section_of(const FusedCall& call, const Layout& layout);

// use(family) with the family of a fusible codec.
template <class Use>
auto with_fused_family(const Codec& codec, DType dtype, const Use& use) {
  using Result = decltype(use(Cast<DType::f32>()));
  return with_family(codec, dtype, [&](const auto& family) -> Result {
    if constexpr (std::decay_t<decltype(family)>::kHot) return use(family);
    return Result();
  });
}

}  // namespace dtcomm::cuda
