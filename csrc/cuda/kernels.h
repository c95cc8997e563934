// The codecs on a CUDA device: the bytes of cpu/kernels.h, from the same scalar rules (csrc/codec). No CUDA type
// appears here, so that the bindings need no toolkit header. All memory is the device's; tensors are aligned to
// their elements and payloads to 16 bytes; work is queued on `stream` (a cudaStream_t) and nothing waits for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "core/types.h"

namespace dtcomm::cuda {

// payload = the encoding of x[0, numel), elements of `dtype`: f32, f16 or bf16, for Family::none any.
// Returns nullptr, or in CUDA's words why nothing was queued.
const char* encode(const Codec& codec, const void* x, DType dtype, std::size_t numel, std::uint64_t key,
                   std::uint64_t offset, std::uint8_t* payload, void* stream);

// out[0, numel) = the decoded payload, in out_dtype; `dtype` is the tensor's (wire dtype of Family::none).
const char* decode(const Codec& codec, const std::uint8_t* payload, std::size_t numel, DType dtype, void* out,
                   DType out_dtype, void* stream);

}  // namespace dtcomm::cuda
