// EmulatedWarp and EmulatedBlock: what cuda/warp.cuh's WarpLanes and cuda/fused/peer_memory.cuh's DeviceBlock are on a
// device, for the threads of a Scheduler. Fault says what tests leave out of a launch.
#pragma once

#include "cuda/fused/peer_memory.cuh"
#include "emulator/scheduler.h"

namespace dtcomm::emulator {

constexpr unsigned kBlockThreads = 64;  // of a fused kernel's block: two warps show what more of them do

struct EmulatedWarp {
  Scheduler& scheduler;

  unsigned thread() const { return scheduler.thread(); }
  unsigned threads() const { return scheduler.threads(); }

  template <class T>
  T swap(T value, unsigned reach) const {
    return scheduler.exchange(value, reach, static_cast<int>(reach));
  }
  void swap_octet(const float (&x)[cuda::kOctet], unsigned reach, float (&other)[cuda::kOctet]) const {
    for (int j = 0; j < cuda::kOctet; ++j) other[j] = swap(x[j], reach);
  }
  std::uint32_t fold(std::uint32_t value) const {
    for (unsigned reach = 1; reach < cuda::kWarp; reach *= 2) value += swap(value, reach);
    return value;
  }
  void together() const { scheduler.exchange(0, 0, -1, true); }
  void barrier() const { scheduler.sync_block(); }
};

// What is left out of a launch, to show that the tests find it. The memory orders matter to a MemoryObserver alone: the
// CPU's own memory provides them all.
struct Fault {
  int point = -1;               // a barrier that threads skip, except for the first time (`entered` always)
  bool waits = true;            // for signals
  bool halves = true;           // one_shot's slots alternate
  bool releases = true;         // signals are releases, else relaxed stores
  bool acquires = true;         // waits are acquires, else relaxed loads
  bool together = true;         // a warp synchronises before its lanes store in each other's places
  bool strong = true;           // missing ranks are recorded by strong stores
  bool streams = true;          // the launches of a rank follow each other
  Scope scope = Scope::system;  // of signals
  unsigned comes = 0;           // launches that an absent rank still makes
};

struct EmulatedBlock : EmulatedWarp {
  cuda::Shared& shared_;
  const Fault& fault;
  mutable unsigned met = 0;  // by this lane

  EmulatedBlock(Scheduler& scheduler, cuda::Shared& shared, const Fault& fault)
      : EmulatedWarp{scheduler}, shared_(shared), fault(fault) {}

  cuda::Shared& shared() const { return shared_; }
  void together() const { scheduler.exchange(0, 0, -1, fault.together); }
  void meet(cuda::Point point) const {
    const bool left_out = static_cast<int>(point) == fault.point && (point == cuda::Point::entered || met++ > 0);
    if (!left_out) scheduler.sync_block();
  }
  unsigned half(std::uint32_t epoch) const { return fault.halves ? epoch & 1 : 0; }

  void note(std::uint32_t* word, std::uint32_t value) const {
    if (fault.strong) return scheduler.store_relaxed(word, value, Scope::system);
    *word = value;
  }
  void signal(std::uint32_t* word, std::uint32_t epoch) const {
    scheduler.signal(word, epoch, fault.releases, fault.scope);
  }
  std::uint32_t look(const std::uint32_t* word) const { return scheduler.load(word, fault.acquires, fault.scope); }
  bool wait(const std::uint32_t* word, std::uint32_t epoch, std::uint64_t) const {
    return !fault.waits || scheduler.wait(word, epoch, fault.acquires, fault.scope);
  }
};

}  // namespace dtcomm::emulator
