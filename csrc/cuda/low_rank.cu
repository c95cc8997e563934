#include "cuda/low_rank.cuh"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/low_rank_expand.cuh"

namespace dtcomm::cuda {

namespace {

template <class Item>
struct Batch {
  Item items[kMaxVectors];
};

// One block for each multiprocessor: there are few matrices, and registers hold the loads in flight.
__global__ void __launch_bounds__(kMaxBlockThreads, 1)
    orthonormalize_kernel(const __grid_constant__ Batch<Vectors> batch) {
  __shared__ GramSchmidtShared shared;
  orthonormalize_block(WarpLanes(), shared, batch.items[blockIdx.x]);
}

__global__ void __launch_bounds__(kMaxBlockThreads) check_finite_kernel(const __grid_constant__ Batch<Factors> batch) {
  __shared__ WarpMaxima maxima;
  check_finite_block(WarpLanes(), maxima, batch.items[blockIdx.x]);
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads, 4) expand_kernel(const __grid_constant__ Expansion call) {
  const std::uint64_t index = blockIdx.x * static_cast<std::uint64_t>(kThreads) + threadIdx.x;
  if (index < expansion_threads(call)) expand_rows<dtype>(call, index);
}

// Launches `kernel` with a block for each item, kMaxVectors at a time.
template <class Item>
Status launch_batches(void (*kernel)(Batch<Item>), const Item* items, std::size_t count, void* stream) {
  (void)cudaGetLastError();  // an earlier, unrelated error is not this call's
  for (std::size_t at = 0; at < count; at += kMaxVectors) {
    const std::size_t size = std::min(kMaxVectors, count - at);
    Batch<Item> batch = {};
    std::copy(items + at, items + at + size, batch.items);
    kernel<<<static_cast<unsigned>(size), kMaxBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(batch);
    if (Status status = launch_status(); !status.ok()) return status;
  }
  return Status();
}

}  // namespace

Status orthonormalize(const Vectors* of, std::size_t count, void* stream) {
  return launch_batches(orthonormalize_kernel, of, count, stream);
}

Status check_finite(const Factors* of, std::size_t count, void* stream) {
  return launch_batches(check_finite_kernel, of, count, stream);
}

Status expand(const Expansion& call, void* stream) {
  const std::uint64_t threads = expansion_threads(call);
  if (threads == 0) return Status();
  (void)cudaGetLastError();
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  with_float(call.dtype, [&](auto dtype) {
    expand_kernel<decltype(dtype)::value><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
  });
  return launch_status();
}

}  // namespace dtcomm::cuda
