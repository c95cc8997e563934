// The operations of one communicator, in the order of its calls, and the right to run them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/failure_monitor.h"
#include "engine/flight_recorder.h"
#include "engine/interpreter.h"
#include "engine/platform.h"
#include "engine/work.h"

namespace dtcomm {

struct QueuedOperation {
  Call call;
  std::shared_ptr<Work> work;
  std::uint64_t number = 0;
  std::unique_ptr<Interpreter> interpreter;  // null until it is started
  std::uint64_t deadline = 0;
  bool overlaps_previous = false;  // it shares memory with the operation before it, so it must not run ahead of it
};

// One thread at a time, the driver, runs operations. The states of the queue:
//
//   free     No thread drives. Any thread may become the driver: a caller that runs its operation inline
//            (start_inline), one that has just queued a small operation (push), one that waits for an operation
//            (start_waiting), or the progress thread (try_drive).
//   driven   One thread is the driver until it calls release(). Only the driver touches interpreters, and only it
//            changes the front of the queue: pointers to queued operations that it holds stay valid, because other
//            threads only push at the back.
//   closed   After close() no operation is accepted and no thread becomes a driver to wait; wait_until_free() returns
//            when the last driver has left.
//
// A thread that waits for an operation while another one drives is registered (start_waiting). When the driver
// releases the queue, the thread that was registered last is asked to take over; if there is none, the driver wakes the
// progress thread.
//
// All methods are thread-safe unless they say "driver only".
class OperationQueue {
 public:
  explicit OperationQueue(const FailureMonitor& failures) : failures_(failures) {}

  // Inline operations. start_inline() makes the caller the driver and returns the operation's number, or 0 if the
  // queue is driven or not empty, in which case the operation has to be pushed. Throws if the communicator is closed
  // or has failed.
  std::uint64_t start_inline(const std::shared_ptr<const Plan>& plan, std::uint64_t now);
  // Driver only. `announced` is false if a peer had failed before the operation was announced. Returns true if the
  // caller is still the driver and has to hand over, because `keep_driving` is set or there is something in the queue.
  bool finish_inline(std::uint64_t number, bool announced, bool failed, std::uint64_t wire_bytes, bool keep_driving);

  // Queued operations. push() throws like start_inline().
  enum class Pushed {
    to_driver,      // the driver will find it
    drive_now,      // the caller is now the driver: it is the only operation, of at most `max_inline_bytes`
    wake_progress,  // no thread drives: the progress thread must be woken
  };
  Pushed push(Call call, std::shared_ptr<Work> work, std::size_t max_inline_bytes, std::uint64_t now);

  // The right to drive.
  enum class Claim { driven, empty, claimed };
  Claim try_drive();
  // Driver only. Returns true if a waiting thread was asked to take over.
  bool release();
  bool has_undriven_work() const;

  // Waiting threads.
  enum class WaitRole {
    drive,     // the caller is now the driver
    sleep,     // another thread drives: call Work::await_handover() until it is true, then stop_waiting()
    finished,  // nothing is queued: the work is finished or about to be
  };
  WaitRole start_waiting(Work& work);
  // True if the caller is now the driver, only to hand over: it was asked to take over, but its work is finished.
  // Never once the queue is closed: then close() ends what is left, and releases what a driver would use.
  bool stop_waiting(Work& work);

  // Driver only: the first and second operation; null if there are fewer.
  QueuedOperation* front();
  QueuedOperation* second();
  // Driver only: completes the first operation and, if it failed, all others with the same failure.
  void finish_front(std::exception_ptr failure, std::uint64_t timeout_ns);
  // Completes all operations with a failure.
  void fail_all(std::exception_ptr failure);

  // Closing. close() asks the driver to stop, which looks at closed(); it returns false if the queue was closed before.
  bool close();
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // Returns when no thread drives any more. After close().
  void wait_until_free();

  // The flight recorder and totals.
  void record_start(std::uint64_t number, std::uint64_t now);
  void record_wait(std::uint64_t number, int peer);
  std::vector<FlightRecord> flight_records() const;
  std::uint64_t operations() const;
  std::uint64_t wire_bytes() const;

 private:
  void require_usable() const;

  const FailureMonitor& failures_;
  mutable std::mutex mutex_;  // of everything below
  std::deque<QueuedOperation> queue_;
  bool driven_ = false;
  std::vector<Work*> waiting_;
  Condition became_free_;
  std::atomic<bool> closed_{false};
  std::uint64_t operations_ = 0;
  std::uint64_t wire_bytes_ = 0;
  FlightRecorder recorder_;
};

}  // namespace dtcomm
