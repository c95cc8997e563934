// A thread block on one CPU thread: its lanes are fibers that take turns in a fixed order, so that a run is always
// the same one. Where lanes exchange values each leaves its own and hands on; when its turn comes again all have
// left theirs. A lane that skips an exchange, or takes another one, is found out.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include "cuda/lanes.cuh"

namespace dtcomm::cuda {

// The first switch to a fiber is a swapcontext; all others are longjmps, which cost no system call.
class Fibers {
 public:
  Fibers() : lanes_(kMostThreads), stacks_(new char[kMostThreads * kStack]) {}

  // body(thread) for `threads` (a multiple of a warp) threads, together.
  void run(unsigned threads, const std::function<void(unsigned)>& body) {
    threads_ = threads;
    body_ = &body;
    for (unsigned lane = 0; lane < threads; ++lane) lanes_[lane].started = false;
    current_ = 0;
    if (_setjmp(home_) == 0) enter(0);
    arrive();
  }

  unsigned thread() const { return current_; }
  unsigned threads() const { return threads_; }

  // Returns when all lanes of the warp have left a value; `what` must be the same for all.
  template <class T>
  T exchange(T value, unsigned from, int what) {
    static_assert(sizeof(T) <= sizeof(std::uint64_t), "fits a slot");
    Lane& lane = lanes_[current_];
    const unsigned side = lane.turn++ % 2;
    std::memcpy(&lane.slot[side], &value, sizeof value);
    lane.what[side] = what;
    const unsigned warp = current_ / kWarp * kWarp;
    hand_on(warp + (current_ + 1) % kWarp);
    const Lane& other = lanes_[from];
    // Lanes before this one may have come to the next exchange already, but not further.
    if (from / kWarp * kWarp != warp || other.what[side] != what || other.turn - lane.turn > 1) fail("exchange");
    T result;
    std::memcpy(&result, &other.slot[side], sizeof result);
    return result;
  }

  // All lanes of the thread block meet.
  void barrier() { hand_on((current_ + 1) % threads_); }

 private:
  static constexpr std::size_t kStack = 64 << 10;

  struct Lane {
    bool started = false;
    unsigned turn = 0;
    std::uint64_t slot[2] = {};
    int what[2] = {};
    jmp_buf at;
  };

  [[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "lane %u: not all lanes of its warp came to the same %s\n", current_, what);
    std::abort();
  }

  static void start() {
    Fibers& self = *here();
    self.arrive();
    (*self.body_)(self.current_);
    self.finish();
  }

  static Fibers*& here() {
    static Fibers* fibers;
    return fibers;
  }

  // Lanes end in their order, as they came.
  [[noreturn]] void finish() {
    if (current_ + 1 == threads_) {
      leave_for(home_stack_, home_size_);
      _longjmp(home_, 1);
    }
    ++current_;
    resume();
  }

  __attribute__((noinline)) void hand_on(unsigned to) {
    if (to == current_) return;
    if (_setjmp(lanes_[current_].at) != 0) return arrive();
    current_ = to;
    resume();
  }

  [[noreturn]] void resume() {
    if (!lanes_[current_].started) enter(current_);
    leave_for(stacks_.get() + current_ * kStack, kStack);
    _longjmp(lanes_[current_].at, 1);
  }

  // Not instrumented: nobody would clear the traces of a frame that is left for good.
  __attribute__((noinline, no_sanitize_address)) [[noreturn]] void enter(unsigned lane) {
    lanes_[lane].started = true;
    lanes_[lane].turn = 0;
    here() = this;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks_.get() + lane * kStack;
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, start, 0);
    leave_for(context.uc_stack.ss_sp, kStack);
    setcontext(&context);
    std::abort();
  }

  // AddressSanitizer wants to know on which stack the program is.
#if defined(__SANITIZE_ADDRESS__)
  void leave_for(const void* stack, std::size_t size) { __sanitizer_start_switch_fiber(nullptr, stack, size); }
  void arrive() {
    const void* from = nullptr;
    std::size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &from, &size);
    if (!home_stack_) home_stack_ = from, home_size_ = size;
  }
#else
  void leave_for(const void*, std::size_t) {}
  void arrive() {}
#endif

  std::vector<Lane> lanes_;
  std::unique_ptr<char[]> stacks_;
  jmp_buf home_;
  const void* home_stack_ = nullptr;
  std::size_t home_size_ = 0;
  unsigned threads_ = 0, current_ = 0;
  const std::function<void(unsigned)>* body_ = nullptr;
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
