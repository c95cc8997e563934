#include "engine/operation_queue.h"

#include <algorithm>
#include <utility>

namespace dtcomm {

void OperationQueue::require_usable() const {
  if (closed()) throw ClosedError("this communicator has been destroyed");
  failures_.throw_if_failed();
}

std::uint64_t OperationQueue::start_inline(const std::shared_ptr<const Plan>& plan, std::uint64_t now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  require_usable();
  if (driven_ || !queue_.empty()) return 0;
  driven_ = true;
  const std::uint64_t number = ++operations_;
  recorder_.issue(number, plan, now);
  recorder_.start(number, now);
  return number;
}

bool OperationQueue::finish_inline(std::uint64_t number, bool announced, bool failed, std::uint64_t wire_bytes,
                                   bool keep_driving) {
  const std::uint64_t now = now_ns();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!announced) recorder_.start(number, 0);
  recorder_.finish(number, failed, now);
  wire_bytes_ += wire_bytes;
  keep_driving |= !queue_.empty() || closed();
  if (!keep_driving) driven_ = false;
  return keep_driving;
}

OperationQueue::Pushed OperationQueue::push(Call call, std::shared_ptr<Work> work, std::size_t max_inline_bytes,
                                            std::uint64_t now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  require_usable();
  QueuedOperation operation;
  operation.call = std::move(call);
  operation.work = std::move(work);
  operation.number = ++operations_;
  recorder_.issue(operation.number, operation.call.plan, now);
  queue_.push_back(std::move(operation));
  if (driven_) return Pushed::to_driver;
  if (queue_.size() > 1 || queue_.front().call.plan->input_bytes() > max_inline_bytes) return Pushed::wake_progress;
  driven_ = true;
  return Pushed::drive_now;
}

OperationQueue::Claim OperationQueue::try_drive() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (driven_) return Claim::driven;
  if (queue_.empty()) return Claim::empty;
  driven_ = true;
  return Claim::claimed;
}

bool OperationQueue::release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  driven_ = false;
  if (closed()) became_free_.notify_all();
  if (queue_.empty() || waiting_.empty()) return false;
  waiting_.back()->hand_over();
  return true;
}

bool OperationQueue::has_undriven_work() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !queue_.empty() && !driven_;
}

OperationQueue::WaitRole OperationQueue::start_waiting(Work& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (queue_.empty() || closed()) return WaitRole::finished;
  if (!driven_) {
    driven_ = true;
    return WaitRole::drive;
  }
  waiting_.push_back(&work);
  return WaitRole::sleep;
}

bool OperationQueue::stop_waiting(Work& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &work));
  if (driven_ || closed() || !work.finished()) return false;
  driven_ = true;
  return true;
}

QueuedOperation* OperationQueue::front() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() ? nullptr : &queue_.front();
}

QueuedOperation* OperationQueue::second() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue_.size() < 2 ? nullptr : &queue_[1];
}

void OperationQueue::finish_front(std::exception_ptr failure, std::uint64_t timeout_ns) {
  std::shared_ptr<Work> work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    QueuedOperation& front = queue_.front();
    work = front.work;
    if (front.interpreter) {
      work->wire_bytes = front.interpreter->wire_bytes();
      work->times = front.interpreter->times();
    }
    wire_bytes_ += work->wire_bytes;
    work->finished_ns = now_ns();
    recorder_.finish(front.number, failure != nullptr, work->finished_ns);
    queue_.pop_front();
    // The next operation may be running already; its time begins now.
    if (!queue_.empty() && queue_.front().interpreter) queue_.front().deadline = work->finished_ns + timeout_ns;
  }
  work->finish(failure);
  if (failure) fail_all(failure);
}

void OperationQueue::fail_all(std::exception_ptr failure) {
  std::deque<QueuedOperation> operations;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    operations.swap(queue_);
    for (const QueuedOperation& operation : operations) recorder_.finish(operation.number, true, now_ns());
  }
  for (QueuedOperation& operation : operations) operation.work->finish(failure);
}

bool OperationQueue::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.exchange(true, std::memory_order_acq_rel)) return false;
  }
  LocalProcess::instance().page().wakeup.notify();
  return true;
}

void OperationQueue::wait_until_free() {
  std::unique_lock<std::mutex> lock(mutex_);
  became_free_.wait(lock, [&] { return !driven_; });
}

void OperationQueue::record_start(std::uint64_t number, std::uint64_t now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  recorder_.start(number, now);
}

void OperationQueue::record_wait(std::uint64_t number, int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  recorder_.wait(number, peer);
}

std::vector<FlightRecord> OperationQueue::flight_records() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return recorder_.list();
}

std::uint64_t OperationQueue::operations() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return operations_;
}

std::uint64_t OperationQueue::wire_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return wire_bytes_;
}

}  // namespace dtcomm
