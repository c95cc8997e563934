// The outcome of one queued operation, for the threads that wait for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

#include "engine/phase_times.h"
#include "engine/platform.h"

namespace dtcomm {

class Communicator;

class Work {
 public:
  // Waits without a limit, because the operation itself has a deadline. Rethrows its failure.
  void wait();
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // For a thread that could run the operation itself while another one does: returns when it is asked to take over
  // (hand_over), or when the work is finished. False if neither has happened within `limit_ns`.
  bool await_handover(std::uint64_t limit_ns);
  void hand_over();
  std::exception_ptr failure() const;

  std::weak_ptr<Communicator> communicator;  // that runs it; set by the bindings

  // Valid once finished.
  std::uint64_t wire_bytes = 0;
  std::uint64_t started_ns = 0;
  std::uint64_t finished_ns = 0;
  PhaseTimes times;

  void finish(std::exception_ptr failure);
  // Puts `ticket` into the CompletionQueue when the work is finished, or at once if it is.
  static void notify(const std::shared_ptr<Work>& work, std::uint64_t ticket);
  // Undoes notify(); false if it is too late and the ticket is or was in the queue.
  bool cancel_notify();

 private:
  mutable std::mutex mutex_;
  Condition changed_;
  std::atomic<bool> finished_{false};  // written under the mutex, read also without it
  bool handed_over_ = false;
  std::exception_ptr failure_;
  std::optional<std::uint64_t> ticket_;
};

// Tickets of finished works whose Python futures are to be completed, for one Python thread.
class CompletionQueue {
 public:
  static CompletionQueue& instance() { return per_process<CompletionQueue>(); }
  void put(std::uint64_t ticket);
  // Waits for the next ticket; nothing after stop().
  std::optional<std::uint64_t> next();
  void stop();

 private:
  std::mutex mutex_;
  Condition changed_;
  std::deque<std::uint64_t> tickets_;
  bool stopped_ = false;
};

}  // namespace dtcomm
