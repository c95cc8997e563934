#include "engine/thread_pool.h"

#include <pthread.h>

#include "engine/platform.h"

namespace dtcomm {
namespace {

// A helper spins between the instructions of an operation, where waking it would take longer than its part.
constexpr WaitPolicy kHelperPolicy{2000, 50 * 1000};
constexpr WaitPolicy kSharedHelperPolicy{0, 0};  // a helper that spins would take its core from a thread with work
// The other parts take about as long as this thread's own. On shared cores a helper may have to wait for its turn.
constexpr WaitPolicy kCallerPolicy{1000, 50 * 1000};
constexpr WaitPolicy kSharedCallerPolicy{16, 50 * 1000};
constexpr int kPartsShift = 32;
constexpr std::uint64_t kSleepUntilWoken = 3600ull * 1000 * 1000 * 1000;

}  // namespace

void ThreadPool::run_shared(int threads, std::uint32_t parts, const Task& task) {
  if (helpers() < threads - 1) start_helpers(threads - 1);
  task_ = task;
  failure_ = nullptr;
  finished_.store(0, std::memory_order_relaxed);
  wanted_helpers_.store(threads - 1, std::memory_order_relaxed);
  claims_.store(std::uint64_t{parts} << kPartsShift, std::memory_order_release);
  full_fence();  // a helper looks for parts after it has announced that it sleeps
  work_.notify();
  claim_parts();
  await_finished(parts);
  if (failure_) std::rethrow_exception(std::move(failure_));
}

// Calls the task for parts that no thread has claimed yet, until none are left.
void ThreadPool::claim_parts() {
  std::uint64_t claims = claims_.load(std::memory_order_relaxed);
  for (;;) {
    const auto parts = static_cast<std::uint32_t>(claims >> kPartsShift);
    const auto part = static_cast<std::uint32_t>(claims);
    if (part >= parts) return;
    // Whatever happened since `claims` was read: once it is exchanged, the part belongs to the present task, which
    // stays until the part is finished.
    if (!claims_.compare_exchange_weak(claims, claims + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
      continue;
    }
    try {
      task_.call(task_.context, part);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failure_mutex_);
      if (!failure_ || part < failed_part_) {
        failure_ = std::current_exception();
        failed_part_ = part;
      }
    }
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == parts) {
      full_fence();
      done_.notify();
    }
    claims = claims_.load(std::memory_order_relaxed);
  }
}

void ThreadPool::await_finished(std::uint32_t parts) {
  const auto finished = [&] { return finished_.load(std::memory_order_acquire) == parts; };
  Backoff backoff(shares_cores_.load(std::memory_order_relaxed) ? kSharedCallerPolicy : kCallerPolicy);
  while (!finished()) {
    if (!backoff.should_sleep()) continue;
    const ScopedSleeper sleeper(done_);
    const std::uint32_t seen = done_.counter.load(std::memory_order_acquire);
    if (!finished()) done_.wait(seen, kSleepNs);
  }
}

void ThreadPool::start_helpers(int count) {
  const std::lock_guard<std::mutex> lock(threads_mutex_);
  while (static_cast<int>(threads_.size()) < count) {
    const int index = static_cast<int>(threads_.size());
    threads_.emplace_back([this, index] { help(index); });
  }
  started_.store(static_cast<int>(threads_.size()), std::memory_order_release);
}

bool ThreadPool::has_parts_for(int index) const {
  const std::uint64_t claims = claims_.load(std::memory_order_relaxed);
  return static_cast<std::uint32_t>(claims) < claims >> kPartsShift &&
         index < wanted_helpers_.load(std::memory_order_relaxed);
}

void ThreadPool::help(int index) {
  pthread_setname_np(pthread_self(), "dtcomm-helper");
  const auto policy = [&] {
    return shares_cores_.load(std::memory_order_relaxed) ? kSharedHelperPolicy : kHelperPolicy;
  };
  Backoff backoff(policy());
  while (!stopping_.load(std::memory_order_acquire)) {
    if (has_parts_for(index)) {
      claim_parts();
      backoff = Backoff(policy());
    } else if (backoff.should_sleep()) {
      const ScopedSleeper sleeper(work_);
      const std::uint32_t seen = work_.counter.load(std::memory_order_acquire);
      if (!has_parts_for(index) && !stopping_.load(std::memory_order_acquire)) work_.wait(seen, kSleepUntilWoken);
    }
  }
}

void ThreadPool::stop() {
  const std::lock_guard<std::mutex> lock(threads_mutex_);
  stopping_.store(true, std::memory_order_seq_cst);
  full_fence();
  work_.notify();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  started_.store(0, std::memory_order_release);
  stopping_.store(false, std::memory_order_release);
}

}  // namespace dtcomm
