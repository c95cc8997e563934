// launch_kernel: runs a kernel whose thread blocks do not depend on each other, one block after the other.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "emulator/block.h"

namespace dtcomm::emulator {

// Runs kernel(EmulatedWarp, shared, argument(block), block) on all threads of `blocks` blocks of `threads` threads;
// `Shared` is the shared memory of a block. If there is an observer, report(observer) is called once at the start to
// register the kernel's other memory. Aborts if the lanes of a warp diverge.
template <class Shared, class ArgumentOf, class Kernel, class Report>
void launch_kernel(Scheduler& scheduler, MemoryObserver* observer, unsigned blocks, unsigned threads,
                   const ArgumentOf& argument_of, Kernel kernel, const Report& report) {
  const auto shared = std::make_unique<Shared[]>(blocks);
  scheduler.observe(observer);
  if (observer) {
    observer->begin({blocks * threads, threads, blocks});
    for (unsigned block = 0; block < blocks; ++block) {
      observer->shared(&shared[block], sizeof(Shared), "block", block);
    }
    report(*observer);
  }
  for (unsigned block = 0; block < blocks; ++block) {
    const auto body = [&, block](unsigned) {
      // A lane's variables lie on its own stack or in memory that is registered with the observer.
      const auto& argument = argument_of(block);
      Shared& own = shared[block];
      Scheduler& lanes = scheduler;
      const Kernel run = kernel;
      const unsigned index = block;
      const Scheduler::LaneScope scope(lanes);
      run(EmulatedWarp{lanes}, own, argument, index);
    };
    if (const Status status = scheduler.run(1, threads, block, body, block * threads); !status.ok()) {
      std::fprintf(stderr, "emulated kernel: %s\n", status.message().c_str());
      std::abort();
    }
  }
  if (observer) observer->end();
  scheduler.observe(nullptr);
}

}  // namespace dtcomm::emulator
