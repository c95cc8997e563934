// The progress thread: one thread per process that drives the queued operations of all communicators. It never takes
// Python's GIL.
#pragma once

#include <poll.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/platform.h"

namespace dtcomm {

class Communicator;

class ProgressThread {
 public:
  static ProgressThread& instance() { return per_process<ProgressThread>(); }
  ProgressThread();
  ~ProgressThread();

  void add(Communicator* communicator);
  // Returns when the thread no longer uses the communicator.
  void remove(Communicator* communicator);
  // To be called when an operation was queued and no thread drives. Without a thread only threads that wait do the
  // work.
  void wake();
  // Starts the thread unless it runs; false if the process may have no more threads.
  bool start();
  // Ends the thread; wake() starts a new one.
  void stop();

  // Whether some communicator waits for sockets or emulated links.
  bool has_latency() const { return latency_communicators_.load(std::memory_order_relaxed) > 0; }

  // While such an object exists, the progress thread rests, and the thread that owns it and waits for `own` does its
  // work. The two then need not take turns on a core.
  class HelpingWaiter {
   public:
    explicit HelpingWaiter(const Communicator* own);
    ~HelpingWaiter();
    HelpingWaiter(const HelpingWaiter&) = delete;
    // Advances the other communicators once; true if any moved.
    bool advance_others();
    // To be called before a sleep.
    void check_fronts();

   private:
    ProgressThread& thread_;
    const Communicator* own_;
  };

 private:
  void loop();
  bool start_locked(std::unique_lock<std::mutex>& lock);
  // Returns when no stop() is under way: two threads must not run loop() at once.
  void await_stop(std::unique_lock<std::mutex>& lock);
  // Advances every communicator once.
  struct AdvanceResult {
    bool moved = false;    // some operation moved
    bool blocked = false;  // some operation cannot move
  };
  AdvanceResult advance_all(bool before_sleep);
  bool rests() const { return helping_waiters_.load(std::memory_order_relaxed) > 0; }

  std::mutex mutex_;  // held while communicators are used
  std::vector<Communicator*> communicators_;
  std::thread thread_;

  std::mutex idle_mutex_;
  std::condition_variable idle_;
  std::condition_variable stopped_;
  std::uint64_t max_sleep_ns_ = 0;  // that the blocked communicators allow
  int wake_fd_;                     // an eventfd by which wake() ends a sleep on sockets
  std::vector<pollfd> sleep_fds_;   // wake_fd_ and the descriptors of blocked communicators with sockets
  std::atomic<bool> sleeps_on_sockets_{false};
  std::atomic<int> latency_communicators_{0};
  std::atomic<bool> has_work_{false};
  std::atomic<int> helping_waiters_{0};
  std::atomic<bool> runs_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace dtcomm
