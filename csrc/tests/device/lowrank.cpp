#undef _FORTIFY_SOURCE  // its longjmp refuses another stack
#include "tests/device/lowrank.h"

#include <memory>

#include "cuda/expand.cuh"
#include "cuda/lowrank.cuh"
#include "tests/device/fibers.h"

namespace dtcomm::device_tests {

namespace {

// run(lanes, shared, of[block]) for all threads of `many` blocks; share(block) tells the watch of their memory.
template <class Shared, class Each, class Run, class Share>
int launch(const Each* of, std::size_t many, cuda::Watch* watch, int kept_back, Run run, const Share& share) {
  static cuda::Fibers fibers;
  constexpr unsigned kThreads = cuda::kMostThreads;
  const auto blocks = static_cast<unsigned>(many);
  const auto rooms = std::make_unique<Shared[]>(many);
  fibers.watch(watch);
  fibers.keep_back(kept_back);
  if (watch) {
    watch->begin({blocks * kThreads, kThreads, blocks});
    for (unsigned block = 0; block < blocks; ++block) {
      watch->shared(&rooms[block], sizeof(Shared), "block", block);
      share(block);
    }
  }
  for (unsigned block = 0; block < blocks; ++block) {
    fibers.run(
        kThreads,
        [&, block](unsigned) {
          const Each given = of[block];
          Shared& room = rooms[block];
          cuda::Fibers& lanes = fibers;
          const auto kernel = run;
          const cuda::Fibers::Inside inside(lanes);
          kernel(cuda::HostWarp{lanes}, room, given);
        },
        block * kThreads);
  }
  if (watch) watch->end();
  fibers.watch(nullptr);
  return fibers.barriers();
}

struct Room {
  cuda::Tops tops;
};

void orthonormalise(const cuda::HostWarp& lanes, cuda::Ledger& ledger, const cuda::Vectors& of) {
  cuda::orthonormalise_block(lanes, ledger, of);
}
void judge(const cuda::HostWarp& lanes, Room& room, const cuda::Factors& of) {
  cuda::judge_block(lanes, room.tops, of);
}

}  // namespace

int orthonormalise_on_fibers(const cuda::Vectors* of, std::size_t many, cuda::Watch* watch, int kept_back) {
  return launch<cuda::Ledger>(of, many, watch, kept_back, orthonormalise, [&](unsigned block) {
    watch->shared(of[block].first, of[block].count * of[block].n * sizeof(float), "vectors", block);
  });
}

void judge_on_fibers(const cuda::Factors* of, std::size_t many, cuda::Watch* watch, int kept_back) {
  launch<Room>(of, many, watch, kept_back, judge, [&](unsigned block) {
    watch->shared(of[block].left, of[block].left_size * sizeof(float), "left", block);
    watch->shared(of[block].right, of[block].right_size * sizeof(float), "right", block);
    watch->shared(of[block].finite, 1, "verdict", block);
  });
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
