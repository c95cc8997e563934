// The device kernels of correctly rounded sums on this CPU.
#pragma once

#include "cuda/rounded_sum.h"
#include "emulator/memory_observer.h"

namespace dtcomm::cuda_emulated {

void measure_emulated(const cuda::MeasureCall& call, emulator::MemoryObserver* observer = nullptr);
void count_emulated(const cuda::CountCall& call);
// `integers`: of the digits of all parts, for the observer.
void split_emulated(const cuda::SplitCall& call, std::size_t integers, emulator::MemoryObserver* observer = nullptr);
void round_emulated(const cuda::RoundCall& call, emulator::MemoryObserver* observer = nullptr);

// All beside the CPU's kernels; false, and has said why, where a byte differs.
bool rounded_sum_tests();

}  // namespace dtcomm::cuda_emulated
