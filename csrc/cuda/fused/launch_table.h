// The launch of the fused kernels of a codec family.
#pragma once

#include "cuda/families.h"
#include "cuda/fused/pipeline.cuh"

namespace dtcomm::cuda {

// Queues one fused kernel. An error holds CUDA's reason. fused/launch.cuh defines it;
// CMake writes one source file with the instantiations of each family of instantiations.txt that has fused kernels.
template <class Family>
Status enqueue(const FusedParams& params, const Family& family, void* stream);

}  // namespace dtcomm::cuda
