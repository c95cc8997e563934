#undef _FORTIFY_SOURCE  // its longjmp refuses another stack
#include "tests/device/device.h"

#include "cuda/choose.h"
#include "cuda/exact.h"
#include "cuda/plan.h"
#include "tests/device/fibers.h"

namespace dtcomm::device_tests {

namespace {

using cuda::Fibers;
using cuda::HostWarp;
using BlockLanes = cuda::BlockLanes<HostWarp>;

// What a thread block shares.
struct Room {
  std::uint32_t words[cuda::kRoom];
  float values[cuda::kSlots];
};

// What all threads of a launch are told.
template <class Family>
struct Arguments {
  cuda::Call call;
  Family family;
};

Fibers& fibers() {
  static Fibers fibers;
  return fibers;
}

// run(warp, room, call, family, tile) for all threads of a launch.
template <class Family, class Run>
void launch(cuda::Watch* watch, unsigned threads, const Arguments<Family>& both, Run run) {
  const unsigned tiles = cuda::tiles(both.call, threads);
  std::vector<Room> rooms(tiles);
  fibers().watch(watch);
  if (watch) {
    watch->begin({tiles * threads, threads, tiles});
    watch->constant(&both, sizeof both);
    for (unsigned tile = 0; tile < tiles; ++tile) watch->shared(&rooms[tile], sizeof(Room), "block", tile);
  }
  for (unsigned tile = 0; tile < tiles; ++tile) {
    fibers().run(
        threads,
        [&, tile](unsigned) {
          const Arguments<Family>& given = both;
          Room& room = rooms[tile];
          Fibers& lanes = fibers();
          const auto kernel = run;
          const unsigned at = tile;
          const Fibers::Inside inside(lanes);
          kernel(HostWarp{lanes}, room, given.call, given.family, at);
        },
        tile * threads);
  }
  if (watch) watch->end();
}

// Elements are a thread's own; nothing that a watch could see.
bool combine_exact(const Combine& call, const std::uint8_t* const* table) {
  const cuda::ExactCall planned = cuda::exact_call(call, table);
  cuda::with_exact(call.dtype, [&](auto zero) {
    for (std::size_t i = 0; i < planned.padded; ++i) cuda::combine_element<decltype(zero)>(planned, i);
  });
  return true;
}

void sparse_block(const HostWarp& warp, Room& room, const cuda::Call& call, const cuda::Sparse& family, unsigned tile) {
  const BlockLanes lanes(warp, room.words);
  call.payload_out ? cuda::combine_sparse<true>(lanes, call, family, tile, room.values)
                   : cuda::combine_sparse<false>(lanes, call, family, tile, room.values);
}

template <class Kernel, class Family>
void dense_block(const HostWarp& warp, Room& room, const cuda::Call& call, const Family& family, unsigned tile) {
  using K = Kernel;
  if constexpr (Family::kHot) {
    cuda::combine_tile<K::kCount, K::kEncodes, K::kFeedback>(warp, call, family, tile);
  } else {
    const BlockLanes lanes(warp, room.words);
    cuda::combine_tile<K::kCount, K::kEncodes, K::kFeedback>(lanes, call, family, tile);
  }
}

}  // namespace

int barriers_on_fibers() { return fibers().barriers(); }

bool combine_on_fibers(const Codec& codec, const Combine& call, const std::uint8_t* const* table, cuda::Watch* watch,
                       int kept_back) {
  fibers().keep_back(kept_back);
  if (cuda::verbatim(codec, call)) return false;
  if (codec.family == Family::none && cuda::exact_type(call.dtype)) return combine_exact(call, table);
  const cuda::Call planned = cuda::plan(codec, call, table);
  if (cuda::is_sparse(codec)) {
    const Arguments<cuda::Sparse> both{planned, cuda::sparse_family(codec, planned)};
    launch(watch, cuda::kMostThreads, both, sparse_block);
    return true;
  }
  cuda::with_family(codec, call.dtype, [&](const auto& family) {
    using F = std::decay_t<decltype(family)>;
    const Arguments<F> both{planned, family};
    const unsigned threads = F::kHot ? cuda::kThreads : cuda::threads_of(family.group());
    cuda::choose<F>(planned, [&](auto kernel) { launch(watch, threads, both, dense_block<decltype(kernel), F>); });
  });
  return true;
}

}  // namespace dtcomm::device_tests
