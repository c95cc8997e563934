// csrc/cuda's fused collectives on this CPU, n virtual ranks in one launch, beside csrc/engine's programs.
#pragma once

#include <string>

#include "emulator/block.h"
#include "emulator/emulator.h"
#include "tests/cuda_emulated/program_files.h"

namespace dtcomm::cuda_emulated {

// A collective without its memory.
struct Scenario {
  cuda::FusedSpec spec;
  std::string algorithm;  // of call.collective, as dtcomm/algorithms names it
  bool residual = false, in_place = false;
  bool bias = false, addend = false;  // of the epilogue
  std::size_t features = 0;           // of the bias
  unsigned calls = 1;                 // one after the other, on the same memory
  bool alternates_plans = false;      // sections and blocks are others in every second call
  unsigned seed = 0;                  // of the data
};

// A trial with the kernel that serves `algorithm`.
Scenario make_scenario(cuda::Collective collective, const std::string& algorithm, int ranks);

// What every test here works with.
struct TestBench {
  emulator::Emulator emulator;
  Programs programs;
  emulator::MemoryObserver* observer = nullptr;  // told of the tensors; the emulator has it, too
};

// Runs it in the order of `order`; what differs from the engine's results, or is not the same on all ranks; empty:
// nothing. `absent`: a rank whose blocks never start; then the ranks that miss it must say so, and nothing is compared.
std::string difference(TestBench& bench, const Scenario& scenario, std::uint64_t order,
                       const emulator::Fault& fault = {}, int absent = -1);

std::string describe(const Scenario& scenario);
const char* name_of(cuda::Collective collective);

// False where a test failed; it has said so.
bool fused_tests(const std::string& programs, unsigned orders);

}  // namespace dtcomm::cuda_emulated
