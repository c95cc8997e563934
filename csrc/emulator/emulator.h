// Emulator: runs fused collectives on this CPU. All ranks of a call are virtual, and the threads of all their blocks
// are fibers of one CPU thread whose order a seed decides. Meant for tests and for machines without a GPU; a CUDA
// thread is a fiber, so only small tensors are practical.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/fused/plan.h"

namespace dtcomm::emulator {

class Scheduler;
class MemoryObserver;
struct Fault;

// A plan of all ranks (first_rank 0, all of them local), and the tensors of one call.
struct EmulatedCall {
  cuda::FusedPlan* plan;
  cuda::LaunchTensors tensors;
};

class Emulator {
 public:
  Emulator();
  ~Emulator();
  Emulator(const Emulator&) = delete;
  Emulator& operator=(const Emulator&) = delete;

  // Runs several calls of the same ranks to their end, on the CPU's memory. The calls of a rank follow each other as on
  // a stream; every rank has a stream of its own. An error means that nothing was run. A wait whose signal can no
  // longer come ends at once, so ranks that miss another rank end as after a timeout. `seed` decides the order of the
  // threads, the blocks of rank `absent` never start, and `fault` is injected (block.h).
  Status launch(const std::vector<EmulatedCall>& calls, std::uint64_t seed, int absent, const Fault& fault);
  Status launch(const EmulatedCall& call, std::uint64_t seed, int absent = -1);

  // Reports the lanes' accesses, and all memory that they use except for tensors, to `observer`; nullptr: to none.
  void observe(MemoryObserver* observer) { observer_ = observer; }

 private:
  Scheduler& scheduler_for(unsigned lanes);

  std::unique_ptr<Scheduler> scheduler_;
  unsigned capacity_ = 0;  // lanes
  MemoryObserver* observer_ = nullptr;
};

}  // namespace dtcomm::emulator
