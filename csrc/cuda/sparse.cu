#include "cuda/sparse.cuh"

#include "cuda/families.h"
#include "cuda/launch.cuh"

namespace dtcomm::cuda {

namespace {

template <bool Encodes>
__global__ void __launch_bounds__(kMaxBlockThreads)
    sparse_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ Sparse family) {
  __shared__ std::uint32_t scratch[kBlockScratchWords];
  __shared__ float values[kSlots];
  combine_sparse<Encodes>(BlockLanes<WarpLanes>(WarpLanes(), scratch), params, family, blockIdx.x, values);
}

}  // namespace

Status launch(const KernelParams& params, const Sparse& family, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const unsigned blocks = tiles(params, kMaxBlockThreads);
  if (params.payload_out) {
    sparse_kernel<true><<<blocks, kMaxBlockThreads, 0, queue>>>(params, family);
  } else {
    sparse_kernel<false><<<blocks, kMaxBlockThreads, 0, queue>>>(params, family);
  }
  return launch_status();
}

}  // namespace dtcomm::cuda
