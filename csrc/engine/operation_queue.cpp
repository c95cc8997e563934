// The operations that are queued, as whoever drives runs them: one at a time, the next one a little ahead.
#include <utility>

#include "engine/communicator.h"

namespace dtcomm {

std::uint64_t Communicator::begin(const Call& call, std::uint64_t number) {
  const std::uint64_t operation = announce(*own_.head, call, number);
  announced_ = number;
  if (call.plan->direct()) ring_peers();
  return operation;
}

// One look at the front of the queue, by whoever drives.
Communicator::Look Communicator::advance_queue(int budget) {
  Operation* front = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty()) return Look::idle;
    front = &queue_.front();  // a deque's front stays where it is while others are pushed behind it
  }
  std::exception_ptr failure;
  try {
    if (!front->machine) {
      check_failures();
      front->machine = make_machine(*front);
    }
    look();
    const Progress progress = front->machine->advance(budget);
    check_machine(*front->machine);
    if (progress != Progress::done) {
      const bool moved = drive_ahead(*front, budget) || progress == Progress::moved;
      return moved ? Look::moved : Look::blocked;
    }
  } catch (...) {
    failure = caught();
  }
  finish_front(failure);
  return Look::moved;
}

Communicator::Look Communicator::drive_front(int budget) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (driven_) return Look::idle;
    if (queue_.empty()) return push_out() ? Look::blocked : Look::idle;
    driven_ = true;
  }
  if (wired) wake_on_time();
  const Look found = advance_queue(budget);
  // Who waits has nothing else to do, and is told at once when it is over.
  return release() ? Look::idle : found;
}

bool Communicator::has_work() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !queue_.empty() && !driven_;
}

std::unique_ptr<Machine> Communicator::make_machine(Operation& operation) {
  const std::uint64_t name = begin(operation.call, operation.number);
  const std::uint64_t now = now_ns();
  operation.work->started_ns = now;
  operation.deadline = now + timeout_ns_.load(std::memory_order_relaxed);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    flights_.start(operation.number, now);
  }
  return std::make_unique<Machine>(*this, operation.call, name, operation.number);
}

// While the last pieces of the front operation are on their way the next one encodes and sends its first, unless the
// two touch the same memory. True where it moved.
bool Communicator::drive_ahead(const Operation& front, int budget) {
  if (!front.machine->launched()) return false;
  Operation* next = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.size() < 2) return false;
    next = &queue_[1];
  }
  if (next->alone) return false;
  if (!next->machine) {
    next->alone = next->call.plan->direct() || !disjoint(front.call, next->call);
    if (next->alone) return false;
    next->machine = make_machine(*next);
  }
  return next->machine->independent() && next->machine->advance(budget, true) == Progress::moved;
}

// Before the driver sleeps: whether the front operation can still end.
void Communicator::watch_queue() {
  Operation* front = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || !queue_.front().machine) return;
    front = &queue_.front();
  }
  try {
    watch(*front->machine, front->deadline);
  } catch (const Error& error) {
    fail(error, culprit_);
    finish_front(std::current_exception());
  }
}

void Communicator::watch_front() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || driven_) return;
    driven_ = true;
  }
  watch_queue();
  release();
}

void Communicator::finish_front(std::exception_ptr failure) {
  std::shared_ptr<Work> work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Operation& front = queue_.front();
    work = front.work;
    if (front.machine) {
      work->wire_bytes = front.machine->wire_bytes();
      work->times = front.machine->times();
    }
    total_wire_bytes_ += work->wire_bytes;
    work->finished_ns = now_ns();
    flights_.finish(front.number, failure != nullptr, work->finished_ns);
    queue_.pop_front();
    if (!queue_.empty() && queue_.front().machine) {  // the next one is under way
      queue_.front().deadline = work->finished_ns + timeout_ns_.load(std::memory_order_relaxed);
    }
  }
  work->finish(failure);
  if (failure) fail_queue(failure);
}

void Communicator::fail_queue(std::exception_ptr failure) {
  std::deque<Operation> queue;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue.swap(queue_);
    for (const Operation& operation : queue) flights_.finish(operation.number, true, now_ns());
  }
  for (Operation& operation : queue) operation.work->finish(failure);
}

}  // namespace dtcomm
