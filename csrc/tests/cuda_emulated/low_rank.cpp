#include "tests/cuda_emulated/low_rank.h"

#include "cuda/low_rank.cuh"
#include "cuda/low_rank_expand.cuh"
#include "emulator/kernel_launch.h"

namespace dtcomm::cuda_emulated {

namespace {

using emulator::EmulatedWarp;
using emulator::MemoryObserver;

emulator::Scheduler& scheduler() {
  static emulator::Scheduler scheduler(cuda::kMaxBlockThreads);
  return scheduler;
}

// A block for each of `of`; tell(observer, block) reports the memory of one.
template <class Shared, class Each, class Kernel, class Tell>
void launch(const Each* of, std::size_t count, MemoryObserver* observer, int hidden_barrier, Kernel kernel,
            const Tell& tell) {
  const auto blocks = static_cast<unsigned>(count);
  scheduler().hide_barrier(hidden_barrier);
  emulator::launch_kernel<Shared>(
      scheduler(), observer, blocks, cuda::kMaxBlockThreads, [&](unsigned block) { return of[block]; }, kernel,
      [&](MemoryObserver& reported_missing) {
        for (unsigned block = 0; block < blocks; ++block) tell(reported_missing, block);
      });
}

struct CheckShared {
  cuda::WarpMaxima maxima;
};

void orthonormalise(const EmulatedWarp& lanes, cuda::GramSchmidtShared& shared, const cuda::Vectors& of, unsigned) {
  cuda::orthonormalise_block(lanes, shared, of);
}

void check_finite(const EmulatedWarp& lanes, CheckShared& shared, const cuda::Factors& of, unsigned) {
  cuda::check_finite_block(lanes, shared.maxima, of);
}

}  // namespace

int orthonormalise_emulated(const cuda::Vectors* of, std::size_t count, MemoryObserver* observer, int hidden_barrier) {
  launch<cuda::GramSchmidtShared>(
      of, count, observer, hidden_barrier, orthonormalise, [&](MemoryObserver& reported_missing, unsigned block) {
        reported_missing.shared(of[block].first, of[block].count * of[block].n * sizeof(float), "vectors", block);
      });
  return scheduler().barriers();
}

void check_finite_emulated(const cuda::Factors* of, std::size_t count, MemoryObserver* observer, int hidden_barrier) {
  launch<CheckShared>(of, count, observer, hidden_barrier, check_finite,
                      [&](MemoryObserver& reported_missing, unsigned block) {
                        reported_missing.shared(of[block].left, of[block].left_size * sizeof(float), "left", block);
                        reported_missing.shared(of[block].right, of[block].right_size * sizeof(float), "right", block);
                        reported_missing.shared(of[block].finite, 1, "finite", block);
                      });
}

// Every element is one thread's, so the order does not matter.
void expand_emulated(const cuda::Expansion& call) {
  cuda::with_float(call.dtype, [&](auto dtype) {
    for (std::uint64_t index = cuda::expansion_threads(call); index-- > 0;) {
      cuda::expand_rows<decltype(dtype)::value>(call, index);
    }
  });
}

}  // namespace dtcomm::cuda_emulated
