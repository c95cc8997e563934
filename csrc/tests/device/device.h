// csrc/cuda's calls, run on this CPU.
#pragma once

#include "cpu/kernels.h"
#include "cuda/fused/host/watch.h"

namespace dtcomm::device_tests {

// cuda::combine without its copies: false, and nothing done, where the call is one. A watch is told what lanes do, and
// of all memory that they use but tensors and payloads.
bool combine_on_fibers(const Codec& codec, const Combine& call, const std::uint8_t* const* table,
                       cuda::Watch* watch = nullptr);

}  // namespace dtcomm::device_tests
