// csrc/cuda's fused collectives on this CPU, n virtual ranks in one launch, beside csrc/engine's programs.
#pragma once

#include <string>

#include "cuda/fused/host/block.h"
#include "cuda/fused/host/emulator.h"
#include "tests/device/programs.h"

namespace dtcomm::device_tests {

// A collective without its memory.
struct Trial {
  cuda::FusedCall call;   // its shape
  std::string algorithm;  // of call.collective, as dtcomm/algorithms names it
  bool residual = false, in_place = false;
  bool bias = false, addend = false;  // of the epilogue
  unsigned calls = 1;                 // one after the other, on the same memory
  bool varies = false;                // sections and blocks are others in every second call
  unsigned seed = 0;                  // of the data
};

// A trial with the kernel that serves `algorithm`.
Trial trial(cuda::Collective collective, const std::string& algorithm, int ranks);

// What every test here works with.
struct Bench {
  cuda::Emulator emulator;
  Programs programs;
  cuda::Watch* watch = nullptr;  // told of the tensors; the emulator has it, too
};

// Runs it in the order of `order`; what differs from the engine's results, or is not the same on all ranks; empty:
// nothing. `absent`: a rank whose blocks never start; then the ranks that miss it must say so, and nothing is compared.
std::string differs(Bench& bench, const Trial& trial, std::uint64_t order, const cuda::Fault& fault = {},
                    int absent = -1);

std::string describe(const Trial& trial);
const char* name_of(cuda::Collective collective);

// False where a test failed; it has said so.
bool fused_tests(const std::string& programs, unsigned orders);

}  // namespace dtcomm::device_tests
