// csrc/cuda's calls, run on this CPU.
#pragma once

#include "cpu/kernels.h"
#include "cuda/fused/host/watch.h"

namespace dtcomm::device_tests {

// cuda::combine without its copies: false, and nothing done, where the call is one. A watch is told what lanes do, and
// of all memory that they use but tensors and payloads; of a thread block's barriers but for the one numbered
// `kept_back`.
bool combine_on_fibers(const Codec& codec, const Combine& call, const std::uint8_t* const* table,
                       cuda::Watch* watch = nullptr, int kept_back = -1);

// How many barriers a thread block of the last call came to.
int barriers_on_fibers();

}  // namespace dtcomm::device_tests
