#include "engine/work.h"

#include <utility>

namespace dtcomm {

void Work::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return finished(); });
  if (failure_) std::rethrow_exception(failure_);
}

bool Work::await_handover(std::uint64_t limit_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_for(lock, limit_ns, [&] { return finished() || handed_over_; })) return false;
  handed_over_ = false;
  return true;
}

void Work::hand_over() {
  const std::lock_guard<std::mutex> lock(mutex_);
  handed_over_ = true;
  changed_.notify_all();
}

std::exception_ptr Work::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Work::finish(std::exception_ptr failure) {
  std::optional<std::uint64_t> ticket;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = std::move(failure);
    finished_.store(true, std::memory_order_release);
    ticket = ticket_;
    changed_.notify_all();
  }
  if (ticket) CompletionQueue::instance().put(*ticket);
}

void Work::notify(const std::shared_ptr<Work>& work, std::uint64_t ticket) {
  {
    const std::lock_guard<std::mutex> lock(work->mutex_);
    work->ticket_ = ticket;
    if (!work->finished()) return;
  }
  CompletionQueue::instance().put(ticket);
}

bool Work::cancel_notify() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished() || !ticket_) return false;
  ticket_.reset();
  return true;
}

void CompletionQueue::put(std::uint64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tickets_.push_back(ticket);
  changed_.notify_one();
}

std::optional<std::uint64_t> CompletionQueue::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return stopped_ || !tickets_.empty(); });
  if (tickets_.empty()) return std::nullopt;
  const std::uint64_t ticket = tickets_.front();
  tickets_.pop_front();
  return ticket;
}

void CompletionQueue::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace dtcomm
