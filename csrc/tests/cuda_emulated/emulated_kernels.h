// cuda::combine on the emulator: the source of csrc/cuda, run on this CPU.
#pragma once

#include <vector>

#include "cpu/kernels.h"
#include "emulator/memory_observer.h"

namespace dtcomm::cuda_emulated {

// Runs cuda::combine. `observer` gets the accesses of the lanes, and the memory that they use beside tensors and
// payloads. The barrier numbered `hidden_barrier` of a thread block is not reported to it.
void combine_emulated(const Codec& codec, const Combine& call, const std::uint8_t* const* table,
                      emulator::MemoryObserver* observer = nullptr, int hidden_barrier = -1);

// One launch for the first of several calls of a dense codec and as many of those behind it as the same kernel serves;
// returns how many these are. No call is a copy.
std::size_t combine_group_emulated(const Codec& codec, const std::vector<const Combine*>& calls,
                                   const std::vector<const std::uint8_t* const*>& tables,
                                   emulator::MemoryObserver* observer = nullptr);

// How many barriers a thread block of the last call came to.
int emulated_barriers();

}  // namespace dtcomm::cuda_emulated
