#include "cuda/kernels.h"

#include <cuda_runtime.h>

#include "cuda/launch_status.h"
#include "cuda/make_params.h"
#include "cuda/sum_native_types.h"

namespace dtcomm::cuda {

namespace {

// Copies the only term of a call to payload_out and out, whichever there are.
Status copy(const Combine& call, const void* from, cudaStream_t queue) {
  const std::size_t bytes = call.numel * size_of(call.dtype);
  if (call.payload_out) {
    cudaMemcpyAsync(call.payload_out, from, bytes, cudaMemcpyDeviceToDevice, queue);
    if (bytes % kAlign) cudaMemsetAsync(call.payload_out + bytes, 0, kAlign - bytes % kAlign, queue);
  }
  if (call.out && call.out != from) cudaMemcpyAsync(call.out, from, bytes, cudaMemcpyDeviceToDevice, queue);
  return launch_status();
}

}  // namespace

Status combine(const Codec& codec, const Combine& call, const std::uint8_t* const* table, void* stream) {
  if (call.numel == 0) return Status();
  (void)cudaGetLastError();  // an earlier, unrelated error is not this call's
  if (const void* from = single_verbatim_term(codec, call)) return copy(call, from, static_cast<cudaStream_t>(stream));
  if (codec.family == Family::none && is_native_sum_type(call.dtype)) return combine_native(call, table, stream);
  const KernelParams params = make_params(codec, call, table, call.payload_out != nullptr);
  if (is_sparse(codec)) return launch(params, sparse_family(codec, params), stream);
  return with_family(codec, call.dtype, [&](const auto& family) { return launch(params, family, stream); });
}

Status decode(const Codec& codec, const std::uint8_t* payload, std::size_t numel, DType dtype, void* out,
              DType out_dtype, void* stream) {
  Combine call;  // a sum of one term
  call.payloads = &payload;
  call.count = 1;
  call.numel = numel;
  call.out = out;
  call.dtype = dtype;
  call.out_dtype = out_dtype;
  return combine(codec, call, nullptr, stream);
}

}  // namespace dtcomm::cuda
