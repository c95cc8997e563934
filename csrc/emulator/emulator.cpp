#include "emulator/emulator.h"

#include <algorithm>
#include <functional>

#include "cuda/fused/kernel_variants.h"
#include "cuda/fused/plan.h"
#include "emulator/block.h"

namespace dtcomm::emulator {

namespace {

// One kernel launch of `blocks` thread blocks a rank: the body of thread block `index` of a rank, and its arguments.
struct Launch {
  unsigned blocks;
  std::function<void(const EmulatedBlock& block, int rank, unsigned index)> body;
  const void* argument;
  std::size_t bytes;
};

template <class Argument, class Family>
struct Arguments {
  Argument argument;
  Family family;
};

// run(block, argument, family, rank, index)
template <class Argument, class Family, class Run>
Launch launch_of(const cuda::FusedCall& call, const Argument& argument, const Family& family, const Run& run) {
  using Both = Arguments<Argument, Family>;
  const auto both = std::make_shared<const Both>(Both{argument, family});
  const auto body = [both, run](const EmulatedBlock& block, int rank, unsigned index) {
    const Both& given = *both;
    const auto kernel = run;
    const Scheduler::LaneScope scope(block.scheduler);  // from here on accesses are a lane's
    kernel(block, given.argument, given.family, rank, index);
  };
  return {call.blocks, body, both.get(), sizeof(Both)};
}

void plan_launches(const cuda::FusedCall& call, std::vector<Launch>& launches) {
  cuda::with_fused_family(call.codec, call.dtype, [&](const auto& family) {
    using Family = std::decay_t<decltype(family)>;
    if (call.algorithm == cuda::Algorithm::program) {
      for (const cuda::Step& planned : cuda::plan_steps(call)) {
        launches.push_back(launch_of(call, planned, family, cuda::run_step<Family, EmulatedBlock>));
      }
      return 0;
    }
    const cuda::Fused fused = cuda::plan_fused(call);
    if (fused.sections == 0) return 0;
    cuda::choose_fused(fused, [&](auto kernel) {
      launches.push_back(launch_of(call, fused, family, decltype(kernel)::template run<Family, EmulatedBlock>));
    });
    return 0;
  });
}

}  // namespace

Emulator::Emulator() = default;
Emulator::~Emulator() = default;

Scheduler& Emulator::scheduler_for(unsigned lanes) {
  if (lanes > capacity_) {
    scheduler_ = std::make_unique<Scheduler>(lanes);
    capacity_ = lanes;
  }
  return *scheduler_;
}

std::string Emulator::launch(const cuda::FusedCall& call, std::uint64_t seed, int absent) {
  return launch(std::vector<cuda::FusedCall>{call}, seed, absent, Fault());
}

std::string Emulator::launch(const std::vector<cuda::FusedCall>& calls, std::uint64_t seed, int absent,
                             const Fault& fault) {
  std::vector<Launch> launches;
  unsigned blocks = 0, ranks = 0;  // blocks: of a rank
  for (const cuda::FusedCall& call : calls) {
    if (std::string reason = cuda::why_not(call); !reason.empty()) return reason;
    if (call.here != call.ranks) return "here: all ranks of an emulated call are virtual";
    if (call.ranks != calls[0].ranks) return "ranks: must be the same for all calls";
    plan_launches(call, launches);
    blocks = std::max(blocks, call.blocks);
    ranks = static_cast<unsigned>(call.ranks);
  }
  if (launches.empty()) return "";
  std::vector<cuda::Shared> shared(ranks * blocks);
  Scheduler& scheduler = scheduler_for(ranks * blocks * kBlockThreads);
  scheduler.observe(observer_);
  if (observer_) {
    observer_->begin({ranks * blocks * kBlockThreads, kBlockThreads, blocks});
    observer_->constant(&fault, sizeof fault);
    for (const Launch& launch : launches) observer_->constant(launch.argument, launch.bytes);
    for (unsigned at = 0; at < shared.size(); ++at) {
      observer_->shared(&shared[at], sizeof(cuda::Shared), "block", at);
    }
    for (unsigned rank = 0; rank < ranks; ++rank) {
      observer_->shared(calls[0].peers[rank].pad, cuda::kPadBytes, "pad", rank);
      observer_->shared(calls[0].peers[rank].room, cuda::memory_bytes(calls[0].room) - cuda::kPadBytes, "room", rank);
    }
  }
  const char* failure = scheduler.run(ranks * blocks, kBlockThreads, seed, [&](unsigned at) {
    const auto rank = static_cast<int>(at / blocks);
    const unsigned index = at % blocks;
    const EmulatedBlock block(scheduler, shared[at], fault);
    const std::size_t last = rank == absent ? fault.comes : launches.size();
    for (std::size_t i = 0; i < std::min(last, launches.size()); ++i) {
      if (index < launches[i].blocks) launches[i].body(block, rank, index);
      scheduler.sync_stream(at - index, blocks, fault.streams);
    }
  });
  if (observer_) observer_->end();
  return failure ? failure : "";
}

}  // namespace dtcomm::emulator
