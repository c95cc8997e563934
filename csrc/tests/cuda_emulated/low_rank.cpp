#include "tests/cuda_emulated/low_rank.h"

#include "cuda/low_rank.cuh"
#include "cuda/low_rank_expand.cuh"
#include "emulator/kernel_launch.h"

namespace dtcomm::cuda_emulated {

namespace {

using emulator::EmulatedWarp;
using emulator::MemoryObserver;

emulator::Scheduler& scheduler() {
  static emulator::Scheduler scheduler(cuda::kMostThreads);
  return scheduler;
}

// A block for each of `of`; tell(observer, block) reports the memory of one.
template <class Shared, class Each, class Kernel, class Tell>
void launch(const Each* of, std::size_t count, MemoryObserver* observer, int hidden_barrier, Kernel kernel,
            const Tell& tell) {
  const auto blocks = static_cast<unsigned>(count);
  scheduler().hide_barrier(hidden_barrier);
  emulator::launch_kernel<Shared>(
      scheduler(), observer, blocks, cuda::kMostThreads, [&](unsigned block) { return of[block]; }, kernel,
      [&](MemoryObserver& told) {
        for (unsigned block = 0; block < blocks; ++block) tell(told, block);
      });
}

struct CheckShared {
  cuda::Tops tops;
};

void orthonormalise(const EmulatedWarp& lanes, cuda::Ledger& ledger, const cuda::Vectors& of, unsigned) {
  cuda::orthonormalise_block(lanes, ledger, of);
}

void judge(const EmulatedWarp& lanes, CheckShared& shared, const cuda::Factors& of, unsigned) {
  cuda::judge_block(lanes, shared.tops, of);
}

}  // namespace

int orthonormalise_emulated(const cuda::Vectors* of, std::size_t count, MemoryObserver* observer, int hidden_barrier) {
  launch<cuda::Ledger>(of, count, observer, hidden_barrier, orthonormalise, [&](MemoryObserver& told, unsigned block) {
    told.shared(of[block].first, of[block].count * of[block].n * sizeof(float), "vectors", block);
  });
  return scheduler().barriers();
}

void judge_emulated(const cuda::Factors* of, std::size_t count, MemoryObserver* observer, int hidden_barrier) {
  launch<CheckShared>(of, count, observer, hidden_barrier, judge, [&](MemoryObserver& told, unsigned block) {
    told.shared(of[block].left, of[block].left_size * sizeof(float), "left", block);
    told.shared(of[block].right, of[block].right_size * sizeof(float), "right", block);
    told.shared(of[block].finite, 1, "finite", block);
  });
}

// Every element is one thread's, so the order does not matter.
void expand_emulated(const cuda::Expansion& call) {
  cuda::with_float(call.dtype, [&](auto dtype) {
    for (std::uint64_t index = cuda::lanes_of(call); index-- > 0;) {
      cuda::expand_rows<decltype(dtype)::value>(call, index);
    }
  });
}

}  // namespace dtcomm::cuda_emulated
