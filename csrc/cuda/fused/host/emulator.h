// Fused collectives on this CPU: all ranks of a call are virtual, and the lanes of all their thread blocks take turns
// in an order that a seed decides. For tests, and for whoever has no device; a lane is a fiber, so small tensors only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/fused.h"

namespace dtcomm::cuda {

class Swarm;
class Watch;
struct Fault;

class Emulator {
 public:
  Emulator();
  ~Emulator();
  Emulator(const Emulator&) = delete;
  Emulator& operator=(const Emulator&) = delete;

  // Runs a call of all ranks (first 0, here all) to its end, on the CPU's memory; empty, or why nothing was run. A wait
  // whose signal can no longer come is over at once, so ranks that miss another one end as after their budget.
  // `absent`: a rank whose blocks never start.
  std::string launch(const FusedCall& call, std::uint64_t order, int absent = -1);

  // Several, of the same ranks: those of a rank follow each other as on a stream, and ranks are in different ones.
  // With something left out, to see whether that is found (block.h).
  std::string launch(const std::vector<FusedCall>& calls, std::uint64_t order, int absent, const Fault& fault);

  // Told what lanes do from now on, and of all memory that they use but tensors; nullptr: nobody.
  void watch(Watch* watch) { watch_ = watch; }

 private:
  Swarm& swarm(unsigned blocks);

  std::unique_ptr<Swarm> swarm_;
  unsigned room_ = 0;
  Watch* watch_ = nullptr;
};

}  // namespace dtcomm::cuda
