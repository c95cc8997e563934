// The outcome of one operation, for whoever waits for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>

#include "engine/phase_times.h"

namespace dtcomm {

class Communicator;

class Work {
 public:
  // Waits without limit: the operation itself has a deadline. Rethrows its failure.
  void wait();
  bool finished() const { return over_.load(std::memory_order_acquire); }
  // A thread that would rather drive than wait: until it is called to, or the work is finished.
  void await_call();
  void call();
  std::exception_ptr failure() const;

  std::weak_ptr<Communicator> communicator;  // that runs it; set by whoever hands the work on

  // Valid once finished.
  std::uint64_t wire_bytes = 0;
  std::uint64_t started_ns = 0;
  std::uint64_t finished_ns = 0;
  Times times;

  void finish(std::exception_ptr failure);
  // Asks for this work to be handed to Completions::next when it is finished (at once if it is).
  static void notify(const std::shared_ptr<Work>& work, std::uint64_t ticket);
  // Takes that back; false where it is too late, and the ticket comes or has come.
  bool unnotify();

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool finished_ = false;
  std::atomic<bool> over_{false};  // the same, for looks without the lock
  bool called_ = false;
  std::exception_ptr failure_;
  bool notify_ = false;
  std::uint64_t ticket_ = 0;
};

// Finished works whose futures Python has to complete; one Python thread takes them.
class Completions {
 public:
  static Completions& instance();
  void put(std::uint64_t ticket);
  // The next ticket; false after stop().
  bool next(std::uint64_t& ticket);
  void stop();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::uint64_t> tickets_;
  bool stopped_ = false;
};

}  // namespace dtcomm
