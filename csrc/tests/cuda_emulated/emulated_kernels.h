// cuda::combine on the emulator: the source of csrc/cuda, run on this CPU.
#pragma once

#include "cpu/kernels.h"
#include "emulator/memory_observer.h"

namespace dtcomm::cuda_emulated {

// cuda::combine without its copies: returns false and does nothing where the call is one. `observer` is told what lanes
// access, and of all memory that they use except for tensors and payloads. Of the barriers of a thread block it is not
// told of the one numbered `hidden_barrier`.
bool combine_emulated(const Codec& codec, const Combine& call, const std::uint8_t* const* table,
                      emulator::MemoryObserver* observer = nullptr, int hidden_barrier = -1);

// How many barriers a thread block of the last call came to.
int emulated_barriers();

}  // namespace dtcomm::cuda_emulated
