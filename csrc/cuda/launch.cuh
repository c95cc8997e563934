// The kernels of a family, queued.
#pragma once

#include <cuda_runtime.h>

#include "cuda/combine_tile.cuh"
#include "cuda/kernel_variants.h"

namespace dtcomm::cuda {

template <class Family, int Count, bool Encodes, bool Feedback>
__global__ void __launch_bounds__(kThreads)
    combine_near(const __grid_constant__ Call call, const __grid_constant__ Family family) {
  combine_tile<Count, Encodes, Feedback>(WarpLanes(), call, family, blockIdx.x);
}

// With groups of up to kMostThreads lanes.
template <class Family, int Count, bool Encodes, bool Feedback>
__global__ void __launch_bounds__(kMostThreads)
    combine_far(const __grid_constant__ Call call, const __grid_constant__ Family family) {
  __shared__ std::uint32_t room[kRoom];
  combine_tile<Count, Encodes, Feedback>(BlockLanes<WarpLanes>(WarpLanes(), room), call, family, blockIdx.x);
}

inline const char* queued() {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

template <class Family>
const char* launch_family(const Call& call, const Family& family, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  return choose<Family>(call, [&](auto kernel) {
    using K = decltype(kernel);
    if constexpr (Family::kHot) {
      combine_near<Family, K::kCount, K::kEncodes, K::kFeedback>
          <<<tiles(call, kThreads), kThreads, 0, queue>>>(call, family);
    } else {
      const unsigned threads = threads_of(family.group());
      combine_far<Family, K::kCount, K::kEncodes, K::kFeedback>
          <<<tiles(call, threads), threads, 0, queue>>>(call, family);
    }
    return queued();
  });
}

}  // namespace dtcomm::cuda
