// Fused collectives, queued: one kernel for the ranks that are here. All thread blocks of a launch run at once, or the
// launch is refused, since they wait for each other.
#pragma once

#include "cuda/families.h"
#include "cuda/peers.cuh"

namespace dtcomm::cuda {

// An all-reduce whose seats and peers are set; `feedback`: the seats have residuals. Each returns nullptr, or in CUDA's
// words why nothing was queued. Which rank was missing is in each rank's pad when the work is done.
const char* all_reduce(Algorithm which, bool feedback, const Fused& fused, const Cast<DType::f32>&, void* stream);
const char* all_reduce(Algorithm which, bool feedback, const Fused& fused, const Cast<DType::f16>&, void* stream);
const char* all_reduce(Algorithm which, bool feedback, const Fused& fused, const Cast<DType::bf16>&, void* stream);
const char* all_reduce(Algorithm which, bool feedback, const Fused& fused, const Integer<8, 4, true>&, void* stream);
const char* all_reduce(Algorithm which, bool feedback, const Fused& fused, const Integer<8, 16, true>&, void* stream);
const char* all_reduce(Algorithm which, bool feedback, const Fused& fused, const Integer<4, 4, true>&, void* stream);
const char* all_reduce(Algorithm which, bool feedback, const Fused& fused, const Integer<4, 16, true>&, void* stream);
const char* all_reduce(Algorithm which, bool feedback, const Fused& fused, const Float8<E4m3, 4, true>&, void* stream);
const char* all_reduce(Algorithm which, bool feedback, const Fused& fused, const Float8<E4m3, 16, true>&, void* stream);

}  // namespace dtcomm::cuda
