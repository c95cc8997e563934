// The fused kernels of a family, queued.
#pragma once

#include <cuda_runtime.h>

#include "cuda/fused.cuh"
#include "cuda/fused.h"

namespace dtcomm::cuda {

template <class Family, Algorithm Which, int Ranks, bool Feedback>
__global__ void __launch_bounds__(kFusedThreads, kFusedBlocks)
    all_reduce_fused(const __grid_constant__ Fused fused, const __grid_constant__ Family family) {
  __shared__ Shared shared;
  const DeviceBlock block(shared);
  const int rank = fused.first + static_cast<int>(blockIdx.x / fused.blocks);
  const unsigned index = blockIdx.x % fused.blocks;
  if constexpr (Which == Algorithm::two_shot) {
    two_shot<Ranks == kAnyCount ? kAnyCount : Ranks - 1, Feedback>(block, fused, family, rank, index);
  } else {
    one_shot<Ranks, Feedback>(block, fused, family, rank, index);
  }
}

template <class Family, Algorithm Which, int Ranks, bool Feedback>
const char* queue_fused(const Fused& fused, const Family& family, void* stream) {
  auto* kernel = all_reduce_fused<Family, Which, Ranks, Feedback>;
  void* arguments[] = {const_cast<Fused*>(&fused), const_cast<Family*>(&family)};
  // Cooperative: refused where the blocks do not fit on the device together.
  const cudaError_t status = cudaLaunchCooperativeKernel(
      reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(fused.here) * fused.blocks),
      dim3(kFusedThreads), arguments, 0, static_cast<cudaStream_t>(stream));
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

// Eight ranks, a host's usual number, have kernels of their own.
template <class Family, Algorithm Which, bool Feedback>
const char* choose_fused(const Fused& fused, const Family& family, void* stream) {
  if (fused.ranks == kMostRanks && fused.seats[0].reduce.op == ReduceOp::sum) {
    return queue_fused<Family, Which, kMostRanks, Feedback>(fused, family, stream);
  }
  return queue_fused<Family, Which, kAnyCount, Feedback>(fused, family, stream);
}

template <class Family>
const char* launch_fused(Algorithm which, bool feedback, const Fused& fused, const Family& family, void* stream) {
  if (which == Algorithm::two_shot) {
    return feedback ? choose_fused<Family, Algorithm::two_shot, true>(fused, family, stream)
                    : choose_fused<Family, Algorithm::two_shot, false>(fused, family, stream);
  }
  return feedback ? choose_fused<Family, Algorithm::one_shot, true>(fused, family, stream)
                  : choose_fused<Family, Algorithm::one_shot, false>(fused, family, stream);
}

}  // namespace dtcomm::cuda
