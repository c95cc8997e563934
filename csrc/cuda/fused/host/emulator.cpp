#undef _FORTIFY_SOURCE  // its longjmp refuses another stack
#include "cuda/fused/host/emulator.h"

#include <algorithm>
#include <functional>

#include "cuda/fused/choose.h"
#include "cuda/fused/host/block.h"
#include "cuda/fused/plan.h"

namespace dtcomm::cuda {

namespace {

// A kernel of `blocks` thread blocks a rank: what thread block `index` of a rank does, and the arguments it does it
// with.
struct Launch {
  unsigned blocks;
  std::function<void(const HostBlock& block, int rank, unsigned index)> body;
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
Launch launch_of(const FusedCall& call, const Argument& argument, const Family& family, const Run& run) {
  using Both = Arguments<Argument, Family>;
  const auto both = std::make_shared<const Both>(Both{argument, family});
  const auto body = [both, run](const HostBlock& block, int rank, unsigned index) {
    const Both& given = *both;
    const auto kernel = run;
    const Swarm::Inside inside(block.swarm);  // from here on all memory is a lane's
    kernel(block, given.argument, given.family, rank, index);
  };
  return {call.blocks, body, both.get(), sizeof(Both)};
}

void plan_launches(const FusedCall& call, std::vector<Launch>& launches) {
  with_fused_family(call.codec, call.dtype, [&](const auto& family) {
    using Family = std::decay_t<decltype(family)>;
    if (call.algorithm == Algorithm::program) {
      for (const Step& planned : plan_steps(call)) {
        launches.push_back(launch_of(call, planned, family, run_step<Family, HostBlock>));
      }
      return 0;
    }
    const Fused fused = plan_fused(call);
    if (fused.sections == 0) return 0;
    choose_fused(fused, [&](auto kernel) {
      launches.push_back(launch_of(call, fused, family, decltype(kernel)::template run<Family, HostBlock>));
    });
    return 0;
  });
}

}  // namespace

Emulator::Emulator() = default;
Emulator::~Emulator() = default;

Swarm& Emulator::swarm(unsigned blocks) {
  if (blocks > room_) {
    swarm_ = std::make_unique<Swarm>(blocks);
    room_ = blocks;
  }
  return *swarm_;
}

std::string Emulator::launch(const FusedCall& call, std::uint64_t order, int absent) {
  return launch(std::vector<FusedCall>{call}, order, absent, Fault());
}

std::string Emulator::launch(const std::vector<FusedCall>& calls, std::uint64_t order, int absent, const Fault& fault) {
  std::vector<Launch> launches;
  unsigned of_rank = 0, ranks = 0;
  for (const FusedCall& call : calls) {
    if (std::string reason = why_not(call); !reason.empty()) return reason;
    if (call.here != call.ranks) return "here: all ranks of an emulated call are virtual";
    if (call.ranks != calls[0].ranks) return "ranks: those of all calls must be the same";
    plan_launches(call, launches);
    of_rank = std::max(of_rank, call.blocks);
    ranks = static_cast<unsigned>(call.ranks);
  }
  if (launches.empty()) return "";
  std::vector<Shared> shared(ranks * of_rank);
  Swarm& lanes = swarm(ranks * of_rank);
  lanes.watch(watch_);
  if (watch_) {
    watch_->begin({ranks * of_rank * Swarm::kThreads, Swarm::kThreads, of_rank});
    watch_->constant(&fault, sizeof fault);
    for (const Launch& launch : launches) watch_->constant(launch.argument, launch.bytes);
    for (unsigned at = 0; at < shared.size(); ++at) watch_->shared(&shared[at], sizeof(Shared), "block", at);
    for (unsigned rank = 0; rank < ranks; ++rank) {
      watch_->shared(calls[0].peers[rank].pad, kPadBytes, "pad", rank);
      watch_->shared(calls[0].peers[rank].room, memory_bytes(calls[0].room) - kPadBytes, "room", rank);
    }
  }
  const char* failure = lanes.run(ranks * of_rank, order, [&](unsigned at) {
    const auto rank = static_cast<int>(at / of_rank);
    const unsigned index = at % of_rank;
    const HostBlock block{lanes, shared[at], fault};
    const std::size_t last = rank == absent ? fault.comes : launches.size();
    for (std::size_t i = 0; i < std::min(last, launches.size()); ++i) {
      if (index < launches[i].blocks) launches[i].body(block, rank, index);
      lanes.follow(at - index, of_rank, fault.streams);
    }
  });
  if (watch_) watch_->end();
  return failure ? failure : "";
}

}  // namespace dtcomm::cuda
