#include "tests/cuda_emulated/rounded_sum.h"

#include "cuda/rounded_sum.cuh"
#include "emulator/kernel_launch.h"

namespace dtcomm::cuda_emulated {

namespace {

using emulator::EmulatedWarp;
using emulator::MemoryObserver;

constexpr unsigned kTileThreads = 64;  // of an emulated thread block: two warps show what more of them do

struct NoShared {};

// `report` registers the memory to which the kernel stores.
template <class Call, class Kernel, class Report>
void launch(const Call& call, std::uint64_t tiles, MemoryObserver* observer, Kernel kernel, const Report& report) {
  static emulator::Scheduler scheduler(kTileThreads);
  emulator::launch_kernel<NoShared>(
      scheduler, observer, static_cast<unsigned>(tiles), kTileThreads, [&](unsigned) -> const Call& { return call; },
      kernel,
      [&](MemoryObserver& active) {
        active.constant(&call, sizeof call);
        report(active);
      });
}

}  // namespace

void measure_emulated(const cuda::MeasureCall& call, MemoryObserver* observer) {
  const auto kernel = [](const EmulatedWarp& lanes, NoShared&, const cuda::MeasureCall& own, unsigned tile) {
    cuda::measure_tile(lanes, own, tile);
  };
  launch(call, cuda::rounded_tiles(call.numel, kTileThreads), observer, kernel, [&](MemoryObserver& active) {
    active.constant(call.from, call.numel * size_of(call.dtype));
    active.shared(call.tops, cuda::rounded_blocks(call.numel), "tops", 0);
    active.shared(call.lows, cuda::rounded_blocks(call.numel), "lows", 0);
  });
}

void count_emulated(const cuda::CountCall& call) {
  for (std::uint64_t block = 0; block < call.blocks + 1; ++block) cuda::count_block(call, block);
}

void split_emulated(const cuda::SplitCall& call, std::size_t integers, MemoryObserver* observer) {
  const auto kernel = [](const EmulatedWarp& lanes, NoShared&, const cuda::SplitCall& own, unsigned tile) {
    cuda::split_tile(lanes, own, cuda::rounded_tiles(own.numel, kTileThreads), tile);
  };
  const std::size_t blocks = cuda::rounded_blocks(call.numel) * call.parts;
  launch(call, cuda::rounded_tiles(call.numel, kTileThreads) * call.parts, observer, kernel,
         [&](MemoryObserver& active) {
           active.constant(call.from, call.numel * call.parts * size_of(call.dtype));
           active.constant(call.sum.tops, blocks);
           active.constant(call.sum.lows, blocks);
           active.constant(call.ends, blocks * sizeof *call.ends);
           active.shared(call.digits, integers * sizeof *call.digits, "digits", 0);
         });
}

void round_emulated(const cuda::RoundCall& call, MemoryObserver* observer) {
  const auto kernel = [](const EmulatedWarp& lanes, NoShared&, const cuda::RoundCall& own, unsigned tile) {
    cuda::round_tile(lanes, own, tile);
  };
  const std::size_t blocks = cuda::rounded_blocks(call.numel);
  launch(call, cuda::rounded_tiles(call.numel, kTileThreads), observer, kernel, [&](MemoryObserver& active) {
    active.constant(call.sum.tops, blocks);
    active.constant(call.sum.lows, blocks);
    active.constant(call.ends, blocks * sizeof *call.ends);
    active.constant(call.digits, static_cast<std::size_t>(call.ends[blocks - 1]) * kHalfBlock * sizeof *call.digits);
    active.shared(call.out, call.numel * size_of(call.dtype), "out", 0);
  });
}

}  // namespace dtcomm::cuda_emulated
