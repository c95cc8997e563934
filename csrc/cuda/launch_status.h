// Whether CUDA took a launch.
#pragma once

#include <cuda_runtime.h>

#include "core/status.h"

namespace dtcomm::cuda {

// An error holds CUDA's reason why the last launch or copy was not queued.
inline Status launch_status() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status() : Status::error(cudaGetErrorString(error));
}

}  // namespace dtcomm::cuda
