// The thread pool: helper threads of this process, which share the work of a thread that runs an operation. All
// communicators use the same ones.
//
// A thread that calls run() publishes its parts. It and the helpers claim one part after the other, so a helper that
// comes late only leaves more parts to the others. The pool serves one run() at a time; a second one meanwhile makes
// all of its calls itself. Helpers that find nothing to do spin for a moment, and then sleep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/platform.h"
#include "engine/process_page.h"
#include "engine/waiter.h"

namespace dtcomm {

class ThreadPool {
 public:
  static ThreadPool& instance() { return per_process<ThreadPool>(); }

  // Calls task(part) once for every part below `parts`, on this thread and on up to `threads` - 1 helpers, and returns
  // when all calls have returned. If some throw, the exception of the lowest part is thrown; the task may not have been
  // called for the parts above. Throws std::system_error if helpers cannot be started.
  template <class Task>
  void run(int threads, std::size_t parts, const Task& task) {
    if (threads > 1 && parts > 1 && parts <= kMaxParts && !in_use_.exchange(true, std::memory_order_acquire)) {
      const Releaser releaser{in_use_};
      run_shared(threads, static_cast<std::uint32_t>(parts),
                 {[](const void* context, std::size_t part) { (*static_cast<const Task*>(context))(part); }, &task});
      return;
    }
    for (std::size_t part = 0; part < parts; ++part) task(part);
  }

  // Threads of this process and of its peers share cores from now on: helpers no longer spin.
  void share_cores() { shares_cores_.store(true, std::memory_order_relaxed); }
  // The number of helpers that run.
  int helpers() const { return started_.load(std::memory_order_acquire); }
  // Ends the helpers; run() starts new ones.
  void stop();

 private:
  static constexpr std::size_t kMaxParts = UINT32_MAX;

  struct Task {
    void (*call)(const void* context, std::size_t part);
    const void* context;
  };
  struct Releaser {
    std::atomic<bool>& flag;
    ~Releaser() { flag.store(false, std::memory_order_release); }
  };

  void run_shared(int threads, std::uint32_t parts, const Task& task);
  void start_helpers(int count);
  void help(int index);
  bool has_parts_for(int index) const;
  void claim_parts();
  void await_finished(std::uint32_t parts);

  std::atomic<bool> in_use_{false};  // by a thread in run_shared(), which alone changes the task
  Task task_{};
  alignas(64) std::atomic<std::uint64_t> claims_{0};  // parts << 32 | the next part to claim
  std::atomic<int> wanted_helpers_{0};                // that may claim parts
  alignas(64) std::atomic<std::uint32_t> finished_{0};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;  // of the lowest part that failed
  std::size_t failed_part_ = 0;

  alignas(64) WakeupFutex work_;  // helpers sleep on it
  alignas(64) WakeupFutex done_;  // the thread in run_shared() does
  std::atomic<bool> shares_cores_{false};
  std::mutex threads_mutex_;  // held while helpers are started and ended
  std::vector<std::thread> threads_;
  std::atomic<int> started_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace dtcomm
