// The two processor operations that spinning and waking need: a hint for spin loops, and a full memory fence.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include <atomic>

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

}  // namespace dtcomm
