// The kernels of a codec family, and their launch.
#pragma once

#include "cuda/combine_tile.cuh"
#include "cuda/families.h"
#include "cuda/kernel_variants.h"
#include "cuda/launch_status.h"

namespace dtcomm::cuda {

template <class Family, int Count, bool Encodes, bool Feedback>
__global__ void __launch_bounds__(kThreads)
    combine_warp_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ Family family) {
  combine_tile<Count, Encodes, Feedback>(WarpLanes(), params, family, blockIdx.x);
}

// For families whose groups have up to kMaxBlockThreads lanes.
template <class Family, int Count, bool Encodes, bool Feedback>
__global__ void __launch_bounds__(kMaxBlockThreads)
    combine_block_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ Family family) {
  __shared__ std::uint32_t scratch[kBlockScratchWords];
  combine_tile<Count, Encodes, Feedback>(BlockLanes<WarpLanes>(WarpLanes(), scratch), params, family, blockIdx.x);
}

template <class Family>
Status launch(const KernelParams& params, const Family& family, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  return with_kernel_variant<Family>(params, [&](auto kernel) {
    using K = decltype(kernel);
    if constexpr (Family::kSpecialized) {
      combine_warp_kernel<Family, K::kCount, K::kEncodes, K::kFeedback>
          <<<tiles(params, kThreads), kThreads, 0, queue>>>(params, family);
    } else {
      const unsigned threads = threads_of(family.group());
      combine_block_kernel<Family, K::kCount, K::kEncodes, K::kFeedback>
          <<<tiles(params, threads), threads, 0, queue>>>(params, family);
    }
    return launch_status();
  });
}

}  // namespace dtcomm::cuda
