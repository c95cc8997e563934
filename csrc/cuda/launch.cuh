// The kernels of a codec family, and their launch.
#pragma once

#include "cuda/combine_tile.cuh"
#include "cuda/families.h"
#include "cuda/kernel_variants.h"
#include "cuda/launch_status.h"

namespace dtcomm::cuda {

template <class Family, int Count, bool Encodes, bool Feedback>
__global__ void __launch_bounds__(kThreads)
    combine_warp_kernel(const __grid_constant__ CallGroup calls, const __grid_constant__ Family family) {
  combine_group_tile<Count, Encodes, Feedback>(WarpLanes(), calls, family, blockIdx.x);
}

// For families whose groups have up to kMaxBlockThreads lanes.
template <class Family, int Count, bool Encodes, bool Feedback>
__global__ void __launch_bounds__(kMaxBlockThreads)
    combine_block_kernel(const __grid_constant__ CallGroup calls, const __grid_constant__ Family family) {
  __shared__ std::uint32_t scratch[kBlockScratchWords];
  combine_group_tile<Count, Encodes, Feedback>(BlockLanes<WarpLanes>(WarpLanes(), scratch), calls, family, blockIdx.x);
}

template <class Family>
Status launch(const CallGroup& calls, const Family& family, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const unsigned tiles = calls.first_tile[calls.size];
  return with_kernel_variant<Family>(calls.items[0], [&](auto kernel) {
    using K = decltype(kernel);
    if constexpr (Family::kSpecialized) {
      combine_warp_kernel<Family, K::kCount, K::kEncodes, K::kFeedback><<<tiles, kThreads, 0, queue>>>(calls, family);
    } else {
      combine_block_kernel<Family, K::kCount, K::kEncodes, K::kFeedback>
          <<<tiles, threads_of(family.group()), 0, queue>>>(calls, family);
    }
    return launch_status();
  });
}

}  // namespace dtcomm::cuda
