#include "engine/work.h"

namespace dtcomm {

void Work::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return finished_; });
  if (failure_) std::rethrow_exception(failure_);
}

void Work::await_call() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return finished_ || called_; });
  called_ = false;
}

void Work::call() {
  const std::lock_guard<std::mutex> lock(mutex_);
  called_ = true;
  changed_.notify_all();
}

std::exception_ptr Work::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Work::finish(std::exception_ptr failure) {
  bool notify = false;
  std::uint64_t ticket = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
    over_.store(true, std::memory_order_release);
    failure_ = std::move(failure);
    notify = notify_;
    ticket = ticket_;
    changed_.notify_all();
  }
  if (notify) Completions::instance().put(ticket);
}

void Work::notify(const std::shared_ptr<Work>& work, std::uint64_t ticket) {
  {
    const std::lock_guard<std::mutex> lock(work->mutex_);
    work->notify_ = true;
    work->ticket_ = ticket;
    if (!work->finished_) return;
  }
  Completions::instance().put(ticket);
}

bool Work::unnotify() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_ || !notify_) return false;
  notify_ = false;
  return true;
}

Completions& Completions::instance() {
  static auto* completions = new Completions;  // outlives every thread that might still put
  return *completions;
}

void Completions::put(std::uint64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tickets_.push_back(ticket);
  changed_.notify_one();
}

bool Completions::next(std::uint64_t& ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return stopped_ || !tickets_.empty(); });
  if (tickets_.empty()) return false;
  ticket = tickets_.front();
  tickets_.pop_front();
  return true;
}

void Completions::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace dtcomm
