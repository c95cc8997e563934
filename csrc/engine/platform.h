// What the engine needs of the processor, the C library and the process: pauses of spin loops and a full fence, integer
// hashing, a condition variable and an object per process that survive fork and exit.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace dtcomm {

// Tells the core that the caller spins, which saves power and leaves more to the core's other hardware thread.
inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// No later load is executed before an earlier store is visible.
inline void full_fence() {
#if defined(__SANITIZE_THREAD__)
  static std::atomic<int> line{0};  // ThreadSanitizer does not model fences
  line.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// Integer hashing (the finaliser of splitmix64), for fingerprints of operations and seeded orders.
constexpr std::uint64_t mix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr std::uint64_t mix64(std::uint64_t a, std::uint64_t b) { return mix64(a ^ mix64(b)); }

inline std::uint64_t hash_bytes(std::uint64_t state, const void* data, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) state = (state ^ p[i]) * 0x100000001b3ull;
  return mix64(state);
}

// A condition variable that a forked child may drop. It is never destroyed, which on Linux frees nothing. The
// destruction waits until no thread waits any more: in a forked child, which has none of its parent's waiting threads,
// that is for ever.
class Condition {
 public:
  Condition() { new (&condition_) std::condition_variable; }
  ~Condition() {}
  Condition(const Condition&) = delete;

  template <class Predicate>
  void wait(std::unique_lock<std::mutex>& lock, Predicate predicate) {
    condition_.wait(lock, std::move(predicate));
  }
  // Whether the predicate became true within `limit_ns`.
  template <class Predicate>
  bool wait_for(std::unique_lock<std::mutex>& lock, std::uint64_t limit_ns, Predicate predicate) {
    return condition_.wait_for(lock, std::chrono::nanoseconds(limit_ns), std::move(predicate));
  }
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  union {
    std::condition_variable condition_;
  };
};

// The process's object of type T, made when it is first asked for and never freed, as threads may use it while the
// process exits. A forked child gets one of its own: threads that it does not have may hold the locks of its parent's.
template <class T>
T& per_process() {
  struct Instance {
    int owner = static_cast<int>(getpid());
    T object;
  };
  static std::atomic<Instance*> current{nullptr};
  Instance* found = current.load(std::memory_order_acquire);
  if (found && found->owner == static_cast<int>(getpid())) return found->object;
  auto made = std::make_unique<Instance>();
  if (current.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) return made.release()->object;
  return found->object;  // another thread was faster
}

}  // namespace dtcomm
