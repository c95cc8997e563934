// The codecs on a CUDA device: the bytes of cpu/kernels.h, from the same scalar rules (csrc/codec). No CUDA type
// appears here, so that the bindings need no toolkit header. All memory is the device's; tensors are aligned to
// their elements and payloads to 16 bytes (tensors aligned to 16 bytes are faster). Work is queued on `stream` (a
// cudaStream_t) of the current device as one kernel, or as copies: nothing is allocated, nothing waits, and a CUDA
// graph may capture it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "core/status.h"
#include "core/types.h"
#include "cpu/kernels.h"

namespace dtcomm::cuda {

// Payload addresses that fit the kernel's arguments. For more payloads the addresses must lie in device memory, too.
constexpr int kInlinePayloads = 16;

// One call as cpu/kernels.h describes it, except that `call.payloads` is host memory, read before this returns, and
// that with more than kInlinePayloads of them `table` is device memory that holds the same addresses until the work is
// done. The hints to stream are ignored. An error holds CUDA's reason why nothing was queued.
Status combine(const Codec& codec, const Combine& call, const std::uint8_t* const* table, void* stream);

// The same for calls of one dtype that do not depend on each other, in as few launches as possible; none of them may
// have more than kInlinePayloads payloads unless it is the only one.
Status combine_all(const Codec& codec, const Combine* calls, std::size_t count, const std::uint8_t* const* table,
                   void* stream);

// out[0, numel) = the decoded payload, in out_dtype; `dtype` is the tensor's (wire dtype of Family::none).
Status decode(const Codec& codec, const std::uint8_t* payload, std::size_t numel, DType dtype, void* out,
              DType out_dtype, void* stream);

}  // namespace dtcomm::cuda
