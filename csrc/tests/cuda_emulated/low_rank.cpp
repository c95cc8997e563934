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

// Runs a kernel with one thread block for each item; report(observer, block) reports the memory of an item.
template <class Shared, class Item, class Kernel, class Report>
void launch(const Item* items, std::size_t count, MemoryObserver* observer, int hidden_barrier, Kernel kernel,
            const Report& report) {
  const auto blocks = static_cast<unsigned>(count);
  scheduler().hide_barrier(hidden_barrier);
  emulator::launch_kernel<Shared>(
      scheduler(), observer, blocks, cuda::kMaxBlockThreads, [&](unsigned block) { return items[block]; }, kernel,
      [&](MemoryObserver& active) {
        for (unsigned block = 0; block < blocks; ++block) report(active, block);
      });
}

struct FiniteShared {
  cuda::WarpMaxima maxima;
};

void orthonormalize(const EmulatedWarp& lanes, cuda::GramSchmidtShared& shared, const cuda::Vectors& of, unsigned) {
  cuda::orthonormalize_block(lanes, shared, of);
}

void check_finite(const EmulatedWarp& lanes, FiniteShared& shared, const cuda::Factors& of, unsigned) {
  cuda::check_finite_block(lanes, shared.maxima, of);
}

}  // namespace

int orthonormalize_emulated(const cuda::Vectors* of, std::size_t count, MemoryObserver* observer, int hidden_barrier) {
  launch<cuda::GramSchmidtShared>(
      of, count, observer, hidden_barrier, orthonormalize, [&](MemoryObserver& active, unsigned block) {
        active.shared(of[block].first, of[block].count * of[block].n * sizeof(float), "vectors", block);
      });
  return scheduler().barriers();
}

void check_finite_emulated(const cuda::Factors* of, std::size_t count, MemoryObserver* observer, int hidden_barrier) {
  launch<FiniteShared>(of, count, observer, hidden_barrier, check_finite, [&](MemoryObserver& active, unsigned block) {
    active.shared(of[block].left, of[block].left_size * sizeof(float), "left", block);
    active.shared(of[block].right, of[block].right_size * sizeof(float), "right", block);
    active.shared(of[block].finite, 1, "finite", block);
  });
}

// Each element belongs to one thread, so the order of the threads does not matter.
void expand_emulated(const cuda::Expansion& call) {
  cuda::with_float(call.dtype, [&](auto dtype) {
    for (std::uint64_t index = cuda::expansion_threads(call); index-- > 0;) {
      cuda::expand_rows<decltype(dtype)::value>(call, index);
    }
  });
}

}  // namespace dtcomm::cuda_emulated
