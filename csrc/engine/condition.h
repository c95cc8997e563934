// A condition variable that a forked child may drop.
#pragma once

#include <condition_variable>
#include <mutex>
#include <new>
#include <utility>

namespace dtcomm {

// Is never destroyed, which on Linux frees nothing. The destruction waits until no thread waits any more: in a forked
// child, which has none of its parent's waiting threads, that is for ever.
class Condition {
 public:
  Condition() { new (&condition_) std::condition_variable; }
  ~Condition() {}
  Condition(const Condition&) = delete;

  template <class Predicate>
  void wait(std::unique_lock<std::mutex>& lock, Predicate predicate) {
    condition_.wait(lock, std::move(predicate));
  }
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  union {
    std::condition_variable condition_;
  };
};

}  // namespace dtcomm
