// Checks fused collectives on the emulator, all ranks virtual, against the engine's results.
#pragma once

#include <string>

#include "emulator/block.h"
#include "emulator/emulator.h"
#include "tests/cuda_emulated/test_inputs.h"

namespace dtcomm::cuda_emulated {

// A collective, without its memory, and what is done with it.
struct Scenario {
  cuda::FusedSpec spec;
  std::string algorithm;  // of spec.collective, as dtcomm/algorithms names it
  bool residual = false, in_place = false;
  bool bias = false, addend = false;  // of the epilogue
  std::size_t features = 0;           // of the bias
  unsigned calls = 1;                 // calls one after the other, on the same memory
  bool alternates_plans = false;      // every second call has other sections and blocks
  unsigned seed = 0;                  // of the data
};

// A scenario with the kernel that serves `algorithm`.
Scenario make_scenario(cuda::Collective collective, const std::string& algorithm, int ranks);

// What all checks share.
struct TestBench {
  emulator::Emulator emulator;
  Programs programs;
  emulator::MemoryObserver* observer = nullptr;  // learns the tensors; set it in the emulator, too
};

// Runs a scenario in an order of threads. Returns what differs from the engine's results or between ranks; empty:
// nothing. The blocks of rank `absent` never start; then the other ranks must report it, and no tensors are compared.
std::string difference(TestBench& bench, const Scenario& scenario, std::uint64_t order,
                       const emulator::Fault& fault = {}, int absent = -1);

std::string describe(const Scenario& scenario);
const char* name_of(cuda::Collective collective);

// The fused collectives, with the inputs of `folder`. Prints the first failure and returns false if there is one.
bool fused_tests(const std::string& folder, unsigned orders);

}  // namespace dtcomm::cuda_emulated
