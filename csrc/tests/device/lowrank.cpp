#undef _FORTIFY_SOURCE  // its longjmp refuses another stack
#include "tests/device/lowrank.h"

#include <memory>

#include "cuda/expand.cuh"
#include "cuda/lowrank.cuh"
#include "tests/device/fibers.h"

namespace dtcomm::device_tests {

int orthonormalise_on_fibers(const cuda::Vectors* of, std::size_t many, cuda::Watch* watch, int kept_back) {
  static cuda::Fibers fibers;
  constexpr unsigned kThreads = cuda::kMostThreads;
  const auto blocks = static_cast<unsigned>(many);
  const auto ledgers = std::make_unique<cuda::Ledger[]>(many);
  fibers.watch(watch);
  fibers.keep_back(kept_back);
  if (watch) {
    watch->begin({blocks * kThreads, kThreads, blocks});
    for (unsigned block = 0; block < blocks; ++block) {
      watch->shared(&ledgers[block], sizeof(cuda::Ledger), "block", block);
      watch->shared(of[block].first, of[block].count * of[block].n * sizeof(float), "vectors", block);
    }
  }
  for (unsigned block = 0; block < blocks; ++block) {
    fibers.run(
        kThreads,
        [&, block](unsigned) {
          const cuda::Vectors given = of[block];
          cuda::Ledger& ledger = ledgers[block];
          cuda::Fibers& lanes = fibers;
          const cuda::Fibers::Inside inside(lanes);
          cuda::orthonormalise_block(cuda::HostWarp{lanes}, ledger, given);
        },
        block * kThreads);
  }
  if (watch) watch->end();
  fibers.watch(nullptr);
  return fibers.barriers();
}

// Elements are a thread's own: in any order.
void expand_here(const cuda::Expansion& call) {
  cuda::with_float(call.dtype, [&](auto dtype) {
    for (std::uint64_t index = cuda::lanes_of(call); index-- > 0;) {
      cuda::expand_rows<decltype(dtype)::value>(call, index);
    }
  });
}

}  // namespace dtcomm::device_tests
