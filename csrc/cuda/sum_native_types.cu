#include "cuda/sum_native_types.h"

#include "cuda/launch.cuh"

namespace dtcomm::cuda {

namespace {

template <class T>
__global__ void __launch_bounds__(kThreads) combine_elements(const __grid_constant__ NativeSumParams call) {
  const std::size_t i = blockIdx.x * static_cast<std::size_t>(kThreads) + threadIdx.x;
  if (i < call.padded) combine_element<T>(call, i);
}

}  // namespace

Status combine_native(const Combine& call, const std::uint8_t* const* table, void* stream) {
  const NativeSumParams planned = native_sum_params(call, table);
  const auto blocks = static_cast<unsigned>((planned.padded + kThreads - 1) / kThreads);
  with_native_type(call.dtype, [&](auto zero) {
    combine_elements<decltype(zero)><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(planned);
  });
  return launch_status();
}

}  // namespace dtcomm::cuda
