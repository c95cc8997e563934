#undef _FORTIFY_SOURCE  // its longjmp refuses another stack
#include "cuda/fused/host/emulator.h"

#include <algorithm>
#include <functional>

#include "cuda/fused/choose.h"
#include "cuda/fused/host/swarm.h"
#include "cuda/fused/plan.h"

namespace dtcomm::cuda {

namespace {

// A kernel of `blocks` thread blocks a rank: what thread block `index` of a rank does.
struct Launch {
  unsigned blocks;
  std::function<void(const HostBlock& block, int rank, unsigned index)> body;
};

void plan_launches(const FusedCall& call, std::vector<Launch>& launches) {
  with_fused_family(call.codec, call.dtype, [&](const auto& family) {
    if (call.algorithm == Algorithm::program) {
      for (Step& planned : plan_steps(call)) {
        const auto step = std::make_shared<const Step>(planned);
        launches.push_back({call.blocks, [step, family](const HostBlock& block, int rank, unsigned index) {
                              run_step(block, *step, family, rank, index);
                            }});
      }
      return 0;
    }
    const auto fused = std::make_shared<const Fused>(plan_fused(call));
    if (fused->sections == 0) return 0;
    choose_fused(*fused, [&](auto kernel) {
      launches.push_back({call.blocks, [fused, family](const HostBlock& block, int rank, unsigned index) {
                            decltype(kernel)::run(block, *fused, family, rank, index);
                          }});
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
  const char* failure = lanes.run(ranks * of_rank, order, [&](unsigned at) {
    const auto rank = static_cast<int>(at / of_rank);
    const unsigned index = at % of_rank;
    if (rank == absent) return;
    const HostBlock block{lanes, shared[at], fault};
    for (const Launch& launch : launches) {
      if (index < launch.blocks) launch.body(block, rank, index);
      lanes.follow(at - index, of_rank);
    }
  });
  return failure ? failure : "";
}

}  // namespace dtcomm::cuda
