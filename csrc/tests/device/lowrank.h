// Low-rank compression's device kernels on this CPU.
#pragma once

#include <cstddef>

#include "cuda/fused/host/watch.h"
#include "cuda/lowrank.h"

namespace dtcomm::device_tests {

// cuda::orthonormalise. Returns how many barriers the last thread block came to; see combine_on_fibers.
int orthonormalise_on_fibers(const cuda::Vectors* of, std::size_t many, cuda::Watch* watch = nullptr,
                             int kept_back = -1);

// cuda::judge.
void judge_on_fibers(const cuda::Factors* of, std::size_t many, cuda::Watch* watch = nullptr, int kept_back = -1);

// cuda::expand.
void expand_here(const cuda::Expansion& call);

// Both beside the CPU's kernels; false, and has said why, where a byte differs.
bool lowrank_tests();

}  // namespace dtcomm::device_tests
