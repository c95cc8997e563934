// What cuda/fused/peers.cuh's DeviceBlock is on a device, and what may be left out of it.
#pragma once

#include "cuda/fused/host/swarm.h"

namespace dtcomm::cuda {

// What is left out of a launch, to see whether that is found. The orders matter to a Watch alone: the CPU's memory has
// them all.
struct Fault {
  int point = -1;               // a Point at which threads meet the first time only (at `entered` never)
  bool waits = true;            // for signals
  bool halves = true;           // of one_shot's slots take turns
  bool releases = true;         // a signal, else it is a relaxed store
  bool acquires = true;         // who waits for one, else by relaxed loads
  bool together = true;         // a warp's lanes before they store in each other's places
  bool strong = true;           // how ranks note who is missing
  bool streams = true;          // launches of a rank follow each other
  Scope scope = Scope::system;  // of signals
  unsigned comes = 0;           // launches that an absent rank still makes
};

struct HostBlock {
  Swarm& swarm;
  Shared& shared_;
  const Fault& fault;
  mutable unsigned met = 0;  // by this lane

  Shared& shared() const { return shared_; }
  unsigned thread() const { return swarm.thread(); }
  unsigned threads() const { return Swarm::kThreads; }

  template <class T>
  T swap(T value, unsigned reach) const {
    return swarm.exchange(value, reach, static_cast<int>(reach));
  }
  void swap_octet(const float (&x)[kOctet], unsigned reach, float (&other)[kOctet]) const {
    for (int j = 0; j < kOctet; ++j) other[j] = swap(x[j], reach);
  }
  void meet(Point point) const {
    const bool left_out = static_cast<int>(point) == fault.point && (point == Point::entered || met++ > 0);
    if (!left_out) swarm.barrier();
  }
  unsigned half(std::uint32_t epoch) const { return fault.halves ? epoch & 1 : 0; }
  void together() const { swarm.exchange(0, 0, -1, fault.together); }

  void note(std::uint32_t* word, std::uint32_t value) const {
    if (fault.strong) return swarm.note(word, value, Scope::system);
    *word = value;
  }
  void signal(std::uint32_t* word, std::uint32_t epoch) const {
    swarm.signal(word, epoch, fault.releases, fault.scope);
  }
  std::uint32_t look(const std::uint32_t* word) const { return swarm.look(word, fault.acquires, fault.scope); }
  bool wait(const std::uint32_t* word, std::uint32_t epoch, std::uint64_t) const {
    return !fault.waits || swarm.wait(word, epoch, fault.acquires, fault.scope);
  }
};

}  // namespace dtcomm::cuda
