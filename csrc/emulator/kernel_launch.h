// launch_kernel: runs a kernel whose thread blocks do not depend on each other, one block after the other.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "emulator/block.h"

namespace dtcomm::emulator {

// Runs kernel(EmulatedWarp, shared, argument(block), block) on all threads of `blocks` blocks of `threads` threads;
// `Shared` is what the threads of a block share. The observer, if there is one, has been told of the kernel's other
// memory by `tell`, which is called when its run has begun. Aborts where the lanes of a warp diverge.
template <class Shared, class ArgumentOf, class Kernel, class Tell>
void launch_kernel(Scheduler& scheduler, MemoryObserver* observer, unsigned blocks, unsigned threads,
                   const ArgumentOf& argument_of, Kernel kernel, const Tell& tell) {
  const auto shared = std::make_unique<Shared[]>(blocks);
  scheduler.observe(observer);
  if (observer) {
    observer->begin({blocks * threads, threads, blocks});
    for (unsigned block = 0; block < blocks; ++block) {
      observer->shared(&shared[block], sizeof(Shared), "block", block);
    }
    tell(*observer);
  }
  for (unsigned block = 0; block < blocks; ++block) {
    const auto body = [&, block](unsigned) {
      // What a lane uses lies on its own stack, or in memory that the observer was told of.
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
