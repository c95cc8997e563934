// One thread per process that drives every communicator's queued operations. It never takes the GIL.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace dtcomm {

class Communicator;

class ProgressThread {
 public:
  // This process's; a forked child gets its own.
  static ProgressThread& instance();

  void add(Communicator* communicator);
  // Returns when the thread no longer looks at it.
  void remove(Communicator* communicator);
  // There is a new operation in some queue.
  void wake();
  // Ends the thread; add() after it starts a new one.
  void stop();

  // Whether some communicator waits for sockets or emulated links.
  bool wired() const { return wired_.load(std::memory_order_relaxed) > 0; }

  // A thread that waits for a communicator does this one's work as well, so that the two need not take turns on a core.
  class Relief {
   public:
    explicit Relief(const Communicator* own);
    ~Relief();
    Relief(const Relief&) = delete;
    // One look at the other communicators; true where any moved.
    bool look();
    // Before a sleep.
    void watch();

   private:
    ProgressThread& thread_;
    const Communicator* own_;
  };

 private:
  ProgressThread();
  void loop();
  bool look_around(bool& blocked);
  bool rests() const { return reliefs_.load(std::memory_order_relaxed) > 0; }

  std::mutex mutex_;  // held while communicators are looked at
  std::vector<Communicator*> communicators_;
  std::thread thread_;

  std::mutex idle_mutex_;
  std::condition_variable idle_;
  std::uint64_t nap_ = 0;   // how long what is blocked allows to sleep
  std::vector<int> wires_;  // what is blocked over sockets, behind `call_`
  int call_;                // an eventfd: wake() ends a sleep over sockets by it
  std::atomic<bool> over_sockets_{false};
  std::atomic<int> wired_{0};  // communicators that wait for more than memory
  std::atomic<bool> work_{false};
  std::atomic<int> reliefs_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace dtcomm
