#undef _FORTIFY_SOURCE  // its longjmp refuses another stack
#include "cuda/fused/host/emulator.h"

#include <vector>

#include "cuda/fused/choose.h"
#include "cuda/fused/host/swarm.h"
#include "cuda/fused/plan.h"

namespace dtcomm::cuda {

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
  return launch(call, order, absent, Fault());
}

std::string Emulator::launch(const FusedCall& call, std::uint64_t order, int absent, const Fault& fault) {
  if (std::string reason = why_not(call); !reason.empty()) return reason;
  if (call.here != call.ranks) return "here: all ranks of an emulated call are virtual";
  const Fused fused = plan_fused(call);
  if (fused.sections == 0) return "";
  const unsigned blocks = static_cast<unsigned>(fused.ranks) * fused.blocks;
  std::vector<Shared> shared(blocks);
  Swarm& lanes = swarm(blocks);
  const char* failure = with_fused_family(call.codec, call.dtype, [&](const auto& family) {
    return choose_fused(fused, [&](auto kernel) {
      return lanes.run(blocks, order, [&](unsigned at) {
        const auto rank = static_cast<int>(at / fused.blocks);
        if (rank == absent) return;
        decltype(kernel)::run(HostBlock{lanes, shared[at], fault}, fused, family, rank, at % fused.blocks);
      });
    });
  });
  return failure ? failure : "";
}

}  // namespace dtcomm::cuda
