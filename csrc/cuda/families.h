// The codec families and the launch of their kernels, as kernels.cu sees them.
#pragma once

#include "cuda/families/cast.cuh"
#include "cuda/families/float8.cuh"
#include "cuda/families/integer.cuh"
#include "cuda/families/mx.cuh"
#include "cuda/families/nvfp4.cuh"
#include "cuda/families/sign.cuh"
#include "cuda/families/variable.cuh"
#include "cuda/params.cuh"
#include "cuda/sparse.cuh"

namespace dtcomm::cuda {

// Queues the kernel that serves calls which `same_kernel` says are alike. An error holds CUDA's reason why nothing was
// queued. launch.cuh defines it; CMake writes one source file with the instantiation of each family of
// instantiations.txt, so that they compile in parallel.
template <class Family>
Status launch(const CallGroup& calls, const Family& family, void* stream);
Status launch(const KernelParams& params, const Sparse& family, void* stream);

}  // namespace dtcomm::cuda
