// Emulator: runs fused collectives on this CPU. All ranks of a call are virtual, and the threads of all their blocks
// are fibers of one CPU thread whose order a seed decides. Meant for tests and for machines without a GPU; a CUDA
// thread is a fiber, so only small tensors are practical.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/fused/collective.h"

namespace dtcomm::emulator {

class Scheduler;
class MemoryObserver;
struct Fault;

class Emulator {
 public:
  Emulator();
  ~Emulator();
  Emulator(const Emulator&) = delete;
  Emulator& operator=(const Emulator&) = delete;

  // Runs a call of all ranks (first 0, here all) to its end, on the CPU's memory. Returns the empty string, or why
  // nothing was run. A wait whose signal can no longer come ends at once, so ranks that miss another rank end as after
  // a timeout. The blocks of rank `absent` never start.
  std::string launch(const cuda::FusedCall& call, std::uint64_t seed, int absent = -1);
  // Runs several calls of the same ranks. The calls of a rank follow each other as on a stream; every rank has a stream
  // of its own. `fault` says what is left out, to show that tests find it (block.h).
  std::string launch(const std::vector<cuda::FusedCall>& calls, std::uint64_t seed, int absent, const Fault& fault);

  // Reports the lanes' accesses, and all memory that they use except for tensors, to `observer`; nullptr: to none.
  void observe(MemoryObserver* observer) { observer_ = observer; }

 private:
  Scheduler& scheduler_for(unsigned lanes);

  std::unique_ptr<Scheduler> scheduler_;
  unsigned capacity_ = 0;
  MemoryObserver* observer_ = nullptr;
};

}  // namespace dtcomm::emulator
