#include "cuda/sparse.cuh"

#include "cuda/families.h"
#include "cuda/launch.cuh"

namespace dtcomm::cuda {

namespace {

template <bool Encodes>
__global__ void __launch_bounds__(kMostThreads)
    sparse_kernel(const __grid_constant__ Call call, const __grid_constant__ Sparse family) {
  __shared__ std::uint32_t room[kRoom];
  __shared__ float values[kSlots];
  combine_sparse<Encodes>(BlockLanes<WarpLanes>(WarpLanes(), room), call, family, blockIdx.x, values);
}

}  // namespace

const char* launch(const Call& call, const Sparse& family, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const unsigned blocks = tiles(call, kMostThreads);
  if (call.payload_out) {
    sparse_kernel<true><<<blocks, kMostThreads, 0, queue>>>(call, family);
  } else {
    sparse_kernel<false><<<blocks, kMostThreads, 0, queue>>>(call, family);
  }
  return queued();
}

}  // namespace dtcomm::cuda
