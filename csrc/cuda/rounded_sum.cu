#include "cuda/rounded_sum.cuh"

#include <cuda_runtime.h>

#include "cuda/kernel_variants.h"
#include "cuda/launch_status.h"

namespace dtcomm::cuda {

namespace {

__global__ void __launch_bounds__(kThreads) measure_kernel(const __grid_constant__ MeasureCall call) {
  measure_tile(WarpLanes(), call, blockIdx.x);
}

__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ CountCall call) {
  count_block(call, blockIdx.x * static_cast<std::uint64_t>(kThreads) + threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) split_kernel(const __grid_constant__ SplitCall call, std::uint64_t tiles) {
  split_tile(WarpLanes(), call, tiles, blockIdx.x);
}

__global__ void __launch_bounds__(kThreads) round_kernel(const __grid_constant__ RoundCall call) {
  round_tile(WarpLanes(), call, blockIdx.x);
}

template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), std::uint64_t tiles, void* stream, const Arguments&... arguments) {
  if (tiles == 0) return Status();
  (void)cudaGetLastError();  // an earlier, unrelated error is not this call's
  kernel<<<static_cast<unsigned>(tiles), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return launch_status();
}

}  // namespace

Status measure_digits(const MeasureCall& call, void* stream) {
  return launch(measure_kernel, rounded_tiles(call.numel, kThreads), stream, call);
}

Status count_digits(const CountCall& call, void* stream) {
  return launch(count_kernel, (call.blocks + kThreads - 1) / kThreads, stream, call);
}

Status split_digits(const SplitCall& call, void* stream) {
  const std::uint64_t tiles = rounded_tiles(call.numel, kThreads);
  return launch(split_kernel, tiles * call.parts, stream, call, tiles);
}

Status round_digits(const RoundCall& call, void* stream) {
  return launch(round_kernel, rounded_tiles(call.numel, kThreads), stream, call);
}

}  // namespace dtcomm::cuda
