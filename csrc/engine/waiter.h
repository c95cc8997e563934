// Waiting for peers: spin, then yield the core, then sleep until a peer wakes this process.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/failure_monitor.h"
#include "engine/interpreter.h"
#include "engine/peer_set.h"

namespace dtcomm {

constexpr std::uint64_t kSleepNs = 20 * 1000 * 1000;  // a sleeping thread checks this often whether it can go on

// How long a thread polls before it sleeps.
struct WaitPolicy {
  int spins = 64;                      // polls before the first yield
  std::uint64_t yield_ns = 50 * 1000;  // time spent yielding before it sleeps
};

// Runs the program's handler of an interrupt that has come, if the calling thread runs such handlers. True if the
// handler raises, so that the thread has to end its wait. The bindings set it; without it no wait is interrupted.
using InterruptCheck = bool (*)();
void set_interrupt_check(InterruptCheck check);

// Calls the InterruptCheck for one wait, so seldom that it costs nothing.
class InterruptWatch {
 public:
  static constexpr std::uint64_t kIntervalNs = 500 * 1000 * 1000;
  // To be called whenever the thread is about to sleep.
  bool interrupted();

 private:
  std::uint64_t next_ns_ = 0;  // 0: not called yet
};

// Counts the polls of one wait.
class Backoff {
 public:
  explicit Backoff(const WaitPolicy& policy) : policy_(policy) {}
  // Something moved: starts over.
  void reset() {
    polls_ = 0;
    yielding_since_ = 0;
  }
  // Call it before each poll: spins or yields for a moment, or returns true if it is time to sleep.
  bool should_sleep();

 private:
  WaitPolicy policy_;
  int polls_ = 0;
  std::uint64_t yielding_since_ = 0;
};

// Polls `step` (a function that returns a Progress) until it returns `done`: spins, yields, then sleeps until a peer
// wakes this process. `before_sleep` is called before each sleep and checks whether the wait can still end.
template <class Step, class BeforeSleep>
void spin_yield_sleep(PeerSet& peers, const FailureMonitor& failures, const WaitPolicy& policy, Step step,
                      BeforeSleep before_sleep) {
  if (peers.has_latency) enable_precise_sleep();
  WakeupFutex& wakeup = LocalProcess::instance().page().wakeup;
  Backoff backoff(policy);
  for (;;) {
    const bool should_sleep = backoff.should_sleep();
    // If an emulated link knows when the next payload arrives, the thread sleeps until then, whatever the policy.
    const std::uint64_t pause = peers.max_sleep_ns(kSleepNs);
    Progress progress = Progress::blocked;
    if (pause == kSleepNs ? should_sleep : pause > 0) {
      before_sleep();
      const ScopedSleeper sleeper(wakeup);
      const std::uint32_t seen = wakeup.counter.load(std::memory_order_acquire);
      progress = step();
      if (progress == Progress::blocked) {
        peers.sleep(wakeup, seen, failures.looks_once_more() ? 0 : peers.max_sleep_ns(kSleepNs));
      }
    } else {
      progress = step();
    }
    if (progress == Progress::done) return;
    if (progress == Progress::moved) backoff.reset();
  }
}

}  // namespace dtcomm
