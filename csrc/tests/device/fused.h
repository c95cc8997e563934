// csrc/cuda's fused all-reduce on this CPU, n virtual ranks in one launch, beside the CPU's kernels.
#pragma once

#include <string>

#include "cuda/fused_plan.h"
#include "tests/device/swarm.h"

namespace dtcomm::device_tests {

struct Collective {
  Codec codec;
  cuda::AllReduce sum;
  bool residual = false, in_place = false;
  unsigned calls = 1;  // one after the other, on the same pads
  unsigned seed = 0;   // of the data
};

// Runs it in the order of `order`; what differs from the CPU's kernels, or is not the same on all ranks; empty:
// nothing. `absent`: a rank whose blocks never start; then the ranks that miss it must say so, and nothing is compared.
std::string differs(Swarm& swarm, const Collective& which, std::uint64_t order, const Fault& fault = {},
                    int absent = -1);

std::string describe(const Collective& which);

// False where a test failed; it has said so.
bool fused_tests(unsigned orders);

}  // namespace dtcomm::device_tests
