// The fused kernels of a codec family, and their launch.
#pragma once

#include <cuda_runtime.h>

#include "cuda/fused/launch_table.h"
#include "cuda/fused/run_collective.cuh"

namespace dtcomm::cuda {

template <class Family>
__global__ void __launch_bounds__(kFusedThreads, kBlocksPerMultiprocessor)
    fused_kernel(const __grid_constant__ FusedParams fused, const __grid_constant__ Family family) {
  __shared__ Shared shared;
  run_collective(DeviceBlock(shared), fused, family, fused.first_rank + static_cast<int>(blockIdx.x / fused.blocks),
                 blockIdx.x % fused.blocks);
}

// A cooperative launch: refused where the blocks do not fit on the device together.
template <class Family>
Status enqueue(const FusedParams& fused, const Family& family, void* stream) {
  const auto blocks = static_cast<unsigned>(fused.local_ranks) * fused.blocks;
  void* arguments[] = {const_cast<FusedParams*>(&fused), const_cast<Family*>(&family)};
  const cudaError_t error =
      cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(fused_kernel<Family>), dim3(blocks),
                                  dim3(kFusedThreads), arguments, 0, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return Status();
  (void)cudaGetLastError();  // or the next, unrelated call would report it
  return Status::error(cudaGetErrorString(error));
}

}  // namespace dtcomm::cuda
