#include "cuda/low_rank.cuh"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/low_rank_expand.cuh"

namespace dtcomm::cuda {

namespace {

template <class Each>
struct Near {
  Each of[kMostVectors];
};

// One block a multiprocessor will do: there are few matrices, and registers hold what is on its way.
__global__ void __launch_bounds__(kMostThreads, 1) orthonormalise_each(const __grid_constant__ Near<Vectors> near) {
  __shared__ Ledger ledger;
  orthonormalise_block(WarpLanes(), ledger, near.of[blockIdx.x]);
}

__global__ void __launch_bounds__(kMostThreads) judge_each(const __grid_constant__ Near<Factors> near) {
  __shared__ Tops tops;
  judge_block(WarpLanes(), tops, near.of[blockIdx.x]);
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads, 4) expand_all(const __grid_constant__ Expansion call) {
  const std::uint64_t index = blockIdx.x * static_cast<std::uint64_t>(kThreads) + threadIdx.x;
  if (index < lanes_of(call)) expand_rows<dtype>(call, index);
}

// A launch of `kernel`, a block for each, for every kMostVectors of them.
template <class Each>
const char* launch_each(void (*kernel)(Near<Each>), const Each* of, std::size_t many, void* stream) {
  (void)cudaGetLastError();  // an error of somebody else's is not this call's
  for (std::size_t at = 0; at < many; at += kMostVectors) {
    const std::size_t here = std::min(kMostVectors, many - at);
    Near<Each> near = {};
    std::copy(of + at, of + at + here, near.of);
    kernel<<<static_cast<unsigned>(here), kMostThreads, 0, static_cast<cudaStream_t>(stream)>>>(near);
    if (const char* error = queued()) return error;
  }
  return nullptr;
}

}  // namespace

const char* orthonormalise(const Vectors* of, std::size_t many, void* stream) {
  return launch_each(orthonormalise_each, of, many, stream);
}

const char* judge(const Factors* of, std::size_t many, void* stream) {
  return launch_each(judge_each, of, many, stream);
}

const char* expand(const Expansion& call, void* stream) {
  const std::uint64_t threads = lanes_of(call);
  if (threads == 0) return nullptr;
  (void)cudaGetLastError();
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  with_float(call.dtype, [&](auto dtype) {
    expand_all<decltype(dtype)::value><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
  });
  return queued();
}

}  // namespace dtcomm::cuda
