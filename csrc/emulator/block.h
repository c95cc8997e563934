// EmulatedWarp and EmulatedBlock: the interfaces of WarpLanes (cuda/warp.cuh) and DeviceBlock
// (cuda/fused/peer_memory.cuh) for the threads of a Scheduler. A Fault is a part of a launch that tests leave out.
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
  T shuffle_xor(T value, unsigned reach) const {
    return scheduler.exchange(value, reach, static_cast<int>(reach));
  }
  void shuffle_xor_vec8(const float (&x)[cuda::kVec8], unsigned reach, float (&other)[cuda::kVec8]) const {
    for (int j = 0; j < cuda::kVec8; ++j) other[j] = shuffle_xor(x[j], reach);
  }
  std::uint32_t warp_sum(std::uint32_t value) const {
    for (unsigned reach = 1; reach < cuda::kWarp; reach *= 2) value += shuffle_xor(value, reach);
    return value;
  }
  void sync_warp() const { scheduler.exchange(0, 0, -1, true); }
  void sync_block() const { scheduler.sync_block(); }
};

// What is left out of a launch, to show that the tests find it. The memory orders matter to a MemoryObserver alone: the
// CPU's own memory provides them all.
struct Fault {
  int barrier = -1;              // a BarrierId that threads skip, except for the first time
  bool waits = true;             // for signals
  bool alternates = true;        // one_shot's slots
  bool releases = true;          // signals are releases, else relaxed stores
  bool acquires = true;          // waits are acquires, else relaxed loads
  bool syncs_warps = true;       // before lanes store in each other's places
  bool strong = true;            // missing ranks are recorded by strong stores
  bool streams = true;           // the launches of a rank follow each other
  Scope scope = Scope::system;   // of signals
  unsigned absent_launches = 0;  // launches that an absent rank still makes
};

struct EmulatedBlock : EmulatedWarp {
  cuda::Shared& shared_;
  const Fault& fault;
  mutable unsigned skippable = 0;  // barriers of fault.barrier that this lane came to

  EmulatedBlock(Scheduler& scheduler, cuda::Shared& shared, const Fault& fault)
      : EmulatedWarp{scheduler}, shared_(shared), fault(fault) {}

  cuda::Shared& shared() const { return shared_; }
  void sync_warp() const { scheduler.exchange(0, 0, -1, fault.syncs_warps); }
  void sync_block(cuda::BarrierId barrier) const {
    const bool skipped = static_cast<int>(barrier) == fault.barrier && skippable++ > 0;
    if (!skipped) scheduler.sync_block();
  }
  unsigned slot_parity(std::uint32_t epoch) const { return fault.alternates ? epoch & 1 : 0; }

  void store_relaxed(std::uint32_t* word, std::uint32_t value) const {
    if (fault.strong) return scheduler.store_relaxed(word, value, Scope::system);
    *word = value;
  }
  void signal(std::uint32_t* word, std::uint32_t epoch) const {
    scheduler.signal(word, epoch, fault.releases, fault.scope);
  }
  std::uint32_t load_acquire(const std::uint32_t* word) const {
    return scheduler.load(word, fault.acquires, fault.scope);
  }
  bool wait(const std::uint32_t* word, std::uint32_t epoch, std::uint64_t) const {
    return !fault.waits || scheduler.wait(word, epoch, fault.acquires, fault.scope);
  }
};

}  // namespace dtcomm::emulator
