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

 private:
  ProgressThread();
  void loop();
  bool look_around(bool& blocked);

  std::mutex mutex_;  // held while communicators are looked at
  std::vector<Communicator*> communicators_;
  std::thread thread_;

  std::mutex idle_mutex_;
  std::condition_variable idle_;
  std::uint64_t nap_ = 0;   // how long what is blocked allows to sleep
  std::vector<int> wires_;  // what is blocked over sockets, behind `call_`
  int call_;                // an eventfd: wake() ends a sleep over sockets by it
  std::atomic<bool> over_sockets_{false};
  std::atomic<bool> work_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace dtcomm
