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
#include "cuda/fused/host/watch.h"
#include "cuda/lanes.cuh"

namespace dtcomm::cuda {

class Fibers {
 public:
  Fibers() : lanes_(kMostThreads), stacks_(kMostThreads) {}

  // Told from now on; nullptr: nobody.
  void watch(Watch* watch) { watch_ = watch; }
  // But for one: the n-th barrier of each thread block from now on; -1: none.
  void keep_back(int barrier) { kept_back_ = barrier; }
  // Of the last thread block.
  int barriers() const { return barriers_; }

  // What is done while it lives is a lane's doing, between two calls of the fibers.
  class Inside {
   public:
    explicit Inside(Fibers& fibers) : fibers_(fibers) { fibers_.enter(); }
    ~Inside() { fibers_.leave(); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Fibers& fibers_;
  };

  // body(thread) for `threads` (a multiple of a warp) threads, together. Lanes end in their order, as they came. To a
  // watch they are the lanes `first` .. `first + threads - 1`.
  void run(unsigned threads, const std::function<void(unsigned)>& body, unsigned first = 0) {
    threads_ = threads;
    first_ = first;
    barriers_ = 0;
    for (unsigned lane = 0; lane < threads; ++lane) lanes_[lane].turn = 0;
    if (watch_) {
      watch_->constant(this, sizeof *this);
      watch_->stacks(stacks_.memory() - std::ptrdiff_t{first} * Stacks::kStack, Stacks::kStack);
    }
    stacks_.run(threads, 0, body, [&](unsigned lane) { return lane + 1 < threads ? lane + 1 : Stacks::kNobody; });
  }

  unsigned thread() const { return stacks_.current(); }
  unsigned threads() const { return threads_; }

  // Returns when all lanes of the warp have left a value; `what` must be the same for all.
  template <class T>
  T exchange(T value, unsigned from, int what, bool orders = false) {
    static_assert(sizeof(T) <= sizeof(std::uint64_t), "fits a slot");
    leave();
    const unsigned current = thread();
    Lane& lane = lanes_[current];
    const unsigned side = lane.turn++ % 2;
    std::memcpy(&lane.slot[side], &value, sizeof value);
    lane.what[side] = what;
    const unsigned warp = current / kWarp * kWarp;
    if (current + 1 == warp + kWarp && orders) meet(warp, kWarp);
    stacks_.hand_on(warp + (current + 1) % kWarp);
    const Lane& other = lanes_[from];
    // Lanes before this one may have come to the next exchange already, but not further.
    if (from / kWarp * kWarp != warp || other.what[side] != what || other.turn - lane.turn > 1) fail("exchange");
    T result;
    std::memcpy(&result, &other.slot[side], sizeof result);
    enter();
    return result;
  }

  // All lanes of the thread block meet.
  void barrier() {
    leave();
    if (thread() + 1 == threads_ && barriers_++ != kept_back_) meet(0, threads_);
    stacks_.hand_on((thread() + 1) % threads_);
    enter();
  }

 private:
  struct Lane {
    unsigned turn = 0;
    std::uint64_t slot[2] = {};
    int what[2] = {};
  };

  void enter() {
    if (watch_) watch_->enter(first_ + thread());
  }
  void leave() {
    if (watch_) watch_->leave();
  }

  // The last of these threads has come, as they come in their order.
  void meet(unsigned thread, unsigned threads) {
    if (!watch_) return;
    std::vector<unsigned> lanes(threads);
    for (unsigned i = 0; i < threads; ++i) lanes[i] = first_ + thread + i;
    watch_->meet(lanes);
  }

  [[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "lane %u: not all lanes of its warp came to the same %s\n", thread(), what);
    std::abort();
  }

  Watch* watch_ = nullptr;
  std::vector<Lane> lanes_;
  Stacks stacks_;
  unsigned threads_ = 0, first_ = 0;
  int barriers_ = 0, kept_back_ = -1;
};

// What lanes.cuh's WarpLanes is on a device.
struct HostWarp {
  Fibers& fibers;

  unsigned thread() const { return fibers.thread(); }
  unsigned threads() const { return fibers.threads(); }
  void together() const { fibers.exchange(0, thread(), -1, true); }
  void barrier() const { fibers.barrier(); }

  template <class T>
  T swap(T value, unsigned reach) const {
    return fibers.exchange(value, thread() ^ reach, static_cast<int>(reach));
  }
  void swap_octet(const float (&x)[kOctet], unsigned reach, float (&other)[kOctet]) const {
    for (int j = 0; j < kOctet; ++j) other[j] = swap(x[j], reach);
  }
  std::uint32_t fold(std::uint32_t value) const {
    for (unsigned reach = 1; reach < kWarp; reach *= 2) value += swap(value, reach);
    return value;
  }
};

}  // namespace dtcomm::cuda
