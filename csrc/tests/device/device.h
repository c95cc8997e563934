// csrc/cuda's calls, run on this CPU.
#pragma once

#include "cpu/kernels.h"

namespace dtcomm::device_tests {

// cuda::combine without its copies: false, and nothing done, where the call is one.
bool combine_on_fibers(const Codec& codec, const Combine& call, const std::uint8_t* const* table);

}  // namespace dtcomm::device_tests
