#include "emulator/emulator.h"

#include <algorithm>
#include <functional>
#include <type_traits>

#include "cuda/fused/run_collective.cuh"
#include "emulator/block.h"

namespace dtcomm::emulator {

namespace {

// One kernel launch of `blocks` thread blocks a rank: the body of thread block `index` of a rank, and its arguments.
struct Launch {
  unsigned blocks;
  std::function<void(const EmulatedBlock& block, int rank, unsigned index)> body;
  const void* arguments;
  std::size_t bytes;
};

template <class Params, class Family>
struct Arguments {
  Params params;
  Family family;
};

// The launch of kernel(block, params, family, rank, index).
template <class Params, class Family, class Kernel>
Launch make_launch(unsigned blocks, const Params& params, const Family& family, Kernel kernel) {
  const auto arguments = std::make_shared<const Arguments<Params, Family>>(Arguments<Params, Family>{params, family});
  const auto body = [arguments, kernel](const EmulatedBlock& block, int rank, unsigned index) {
    const Arguments<Params, Family>& own = *arguments;
    const Kernel run = kernel;
    const Scheduler::LaneScope scope(block.scheduler);  // from here on accesses are the lane's
    run(block, own.params, own.family, rank, index);
  };
  return {blocks, body, arguments.get(), sizeof *arguments};
}

void add_launch(const EmulatedCall& call, std::vector<Launch>& launches) {
  const cuda::FusedSpec& spec = call.plan->spec();
  // Recording a launch cannot fail.
  (void)cuda::with_fused_family(spec.codec, spec.dtype, [&](const auto& family) {
    using Family = std::decay_t<decltype(family)>;
    return call.plan->with_params(call.tensors, [&](const cuda::FusedParams& params) -> Status {
      launches.push_back(make_launch(spec.blocks, params, family, cuda::run_collective<Family, EmulatedBlock>));
      return Status();
    });
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

Status Emulator::launch(const EmulatedCall& call, std::uint64_t seed, int absent) {
  return launch(std::vector<EmulatedCall>{call}, seed, absent, Fault());
}

Status Emulator::launch(const std::vector<EmulatedCall>& calls, std::uint64_t seed, int absent, const Fault& fault) {
  std::vector<Launch> launches;
  const cuda::FusedSpec& first = calls[0].plan->spec();
  unsigned blocks = 0;  // of a rank
  for (const EmulatedCall& call : calls) {
    const cuda::FusedSpec& spec = call.plan->spec();
    if (Status status = call.plan->check(call.tensors); !status.ok()) return status;
    if (spec.local_ranks != spec.ranks) return Status::error("local_ranks: all ranks of an emulated call are virtual");
    if (spec.ranks != first.ranks) return Status::error("ranks: must be the same for all calls");
    add_launch(call, launches);
    blocks = std::max(blocks, spec.blocks);
  }
  if (launches.empty()) return Status();
  const auto ranks = static_cast<unsigned>(first.ranks);
  std::vector<cuda::Shared> shared(ranks * blocks);
  Scheduler& scheduler = scheduler_for(ranks * blocks * kBlockThreads);
  scheduler.observe(observer_);
  if (observer_) {
    observer_->begin({ranks * blocks * kBlockThreads, kBlockThreads, blocks});
    observer_->constant(&fault, sizeof fault);
    for (const Launch& launch : launches) observer_->constant(launch.arguments, launch.bytes);
    for (unsigned at = 0; at < shared.size(); ++at) {
      observer_->shared(&shared[at], sizeof(cuda::Shared), "block", at);
    }
    const std::size_t buffer_bytes = cuda::memory_bytes(first.buffer_layout) - cuda::kPadBytes;
    for (unsigned rank = 0; rank < ranks; ++rank) {
      observer_->pushed(first.peers[rank].pad, cuda::kPadBytes, "pad", rank);
      observer_->pushed(first.peers[rank].buffer, buffer_bytes, "buffer", rank);
    }
  }
  Status status = scheduler.run(ranks * blocks, kBlockThreads, seed, [&](unsigned at) {
    const auto rank = static_cast<int>(at / blocks);
    const unsigned index = at % blocks;
    const EmulatedBlock block(scheduler, shared[at], fault);
    const std::size_t last = rank == absent ? fault.absent_launches : launches.size();
    for (std::size_t i = 0; i < std::min(last, launches.size()); ++i) {
      if (index < launches[i].blocks) launches[i].body(block, rank, index);
      scheduler.sync_stream(at - index, blocks, fault.streams);
    }
  });
  if (observer_) observer_->end();
  return status;
}

}  // namespace dtcomm::emulator
