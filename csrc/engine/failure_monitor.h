// Decides when an operation cannot complete and which rank is at fault, and passes failures on: a rank whose operation
// fails publishes the error in its region, so that all ranks of the communicator raise the same one.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

#include "core/error.h"
#include "engine/interpreter.h"
#include "engine/peer_set.h"

namespace dtcomm {

// Only the thread that drives operations calls it, except for set_interrupted(), failed(), throw_if_failed() and
// message().
class FailureMonitor {
 public:
  explicit FailureMonitor(PeerSet& peers) : peers_(peers) {}

  // Throws the error that a peer has published.
  void check_peers() const;
  // Throws if the interpreter found that a peer runs another operation, or a damaged payload.
  void check_interpreter(const Interpreter& interpreter) {
    if (interpreter.mismatch()) throw_mismatch(interpreter);
    if (interpreter.corrupt()) throw_corrupt(interpreter);
  }
  // For a blocked operation, before its thread sleeps: publishes whom this rank waits for, and throws if the operation
  // can no longer complete. `timeout_ns` is the limit that `deadline` was computed from.
  void check_blocked(const Interpreter& interpreter, std::uint64_t deadline, std::uint64_t timeout_ns);
  // check_blocked() found that the awaited peer has ended, or that the time is over. What is needed may have come
  // before that, also while this process was stopped, so the caller must let the interpreter look once more, without
  // sleeping; the next call throws.
  bool looks_once_more() const { return suspect_ != kNone; }
  // Ends the waits of this rank: the next check_blocked() throws, in whichever thread. May be called by any thread.
  void set_interrupted(bool interrupted) { interrupted_.store(interrupted, std::memory_order_relaxed); }

  // Makes this communicator fail: every later call throws, and the peers read the error in this rank's region.
  void publish(const Error& error);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void throw_if_failed() const;
  // Empty unless failed.
  std::string message() const;

 private:
  [[noreturn]] void throw_mismatch(const Interpreter& interpreter);
  [[noreturn]] void throw_corrupt(const Interpreter& interpreter) const;
  [[noreturn]] void throw_timeout(const Interpreter& interpreter, std::uint64_t timeout_ns) const;
  bool confirm_suspect(int suspect);

  PeerSet& peers_;
  static constexpr int kNone = -1, kDeadline = -2;
  int suspect_ = kNone;  // or the peer that has ended
  std::atomic<bool> interrupted_{false};
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;  // of what follows
  ErrorKind kind_ = ErrorKind::none;
  std::string message_;
};

}  // namespace dtcomm
