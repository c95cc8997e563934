// Low-rank compression's device kernels on this CPU.
#pragma once

#include <cstddef>

#include "cuda/low_rank.h"
#include "emulator/memory_observer.h"

namespace dtcomm::cuda_emulated {

// cuda::orthonormalize. Returns how many barriers the last thread block came to; see combine_emulated.
int orthonormalize_emulated(const cuda::Vectors* of, std::size_t count, emulator::MemoryObserver* observer = nullptr,
                            int hidden_barrier = -1);

// cuda::judge.
void check_finite_emulated(const cuda::Factors* of, std::size_t count, emulator::MemoryObserver* observer = nullptr,
                           int hidden_barrier = -1);

// cuda::expand.
void expand_emulated(const cuda::Expansion& call);

// Both beside the CPU's kernels; false, and has said why, where a byte differs.
bool low_rank_tests();

}  // namespace dtcomm::cuda_emulated
