// A thread block on one CPU thread: its lanes are fibers that take turns in a fixed order, so that a run is always
// the same one. Where lanes exchange values each leaves its own and hands on; when its turn comes again all have
// left theirs. A lane that skips an exchange, or takes another one, is found out.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "cuda/fused/host/stacks.h"
#include "cuda/lanes.cuh"

namespace dtcomm::cuda {

class Fibers {
 public:
  Fibers() : lanes_(kMostThreads), stacks_(kMostThreads) {}

  // body(thread) for `threads` (a multiple of a warp) threads, together. Lanes end in their order, as they came.
  void run(unsigned threads, const std::function<void(unsigned)>& body) {
    threads_ = threads;
    for (unsigned lane = 0; lane < threads; ++lane) lanes_[lane].turn = 0;
    stacks_.run(threads, 0, body, [&](unsigned lane) { return lane + 1 < threads ? lane + 1 : Stacks::kNobody; });
  }

  unsigned thread() const { return stacks_.current(); }
  unsigned threads() const { return threads_; }

  // Returns when all lanes of the warp have left a value; `what` must be the same for all.
  template <class T>
  T exchange(T value, unsigned from, int what) {
    static_assert(sizeof(T) <= sizeof(std::uint64_t), "fits a slot");
    const unsigned current = thread();
    Lane& lane = lanes_[current];
    const unsigned side = lane.turn++ % 2;
    std::memcpy(&lane.slot[side], &value, sizeof value);
    lane.what[side] = what;
    const unsigned warp = current / kWarp * kWarp;
    stacks_.hand_on(warp + (current + 1) % kWarp);
    const Lane& other = lanes_[from];
    // Lanes before this one may have come to the next exchange already, but not further.
    if (from / kWarp * kWarp != warp || other.what[side] != what || other.turn - lane.turn > 1) fail("exchange");
    T result;
    std::memcpy(&result, &other.slot[side], sizeof result);
    return result;
  }

  // All lanes of the thread block meet.
  void barrier() { stacks_.hand_on((thread() + 1) % threads_); }

 private:
  struct Lane {
    unsigned turn = 0;
    std::uint64_t slot[2] = {};
    int what[2] = {};
  };

  [[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "lane %u: not all lanes of its warp came to the same %s\n", thread(), what);
    std::abort();
  }

  std::vector<Lane> lanes_;
  Stacks stacks_;
  unsigned threads_ = 0;
};

// What lanes.cuh's WarpLanes and BlockLanes are on a device.
struct HostLanes {
  Fibers& fibers;

  unsigned thread() const { return fibers.thread(); }
  unsigned threads() const { return fibers.threads(); }
  void barrier() const { fibers.barrier(); }

  template <class T>
  T swap(T value, unsigned reach) const {
    if (reach < kWarp) return fibers.exchange(value, thread() ^ reach, static_cast<int>(reach));
    std::uint64_t& slot = room()[thread()];
    std::memcpy(&slot, &value, sizeof value);
    fibers.barrier();
    T other;
    std::memcpy(&other, &room()[thread() ^ reach], sizeof other);
    fibers.barrier();
    return other;
  }

  std::uint32_t sum(std::uint32_t value, std::uint32_t) const {
    for (unsigned reach = 1; reach < threads(); reach *= 2) value += swap(value, reach);
    return value;
  }

  void swap_octet(const float (&x)[kOctet], unsigned reach, float (&other)[kOctet]) const {
    for (int j = 0; j < kOctet; ++j) other[j] = swap(x[j], reach);
  }

 private:
  static std::uint64_t* room() {
    static std::uint64_t shared[kMostThreads];
    return shared;
  }
};

}  // namespace dtcomm::cuda
