// What spinning and waking need of the processor: the hint of a core that waits, and a full fence.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include <atomic>

namespace dtcomm {

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// No later load is done before an earlier store can be seen.
inline void full_fence() {
#if defined(__SANITIZE_THREAD__)
  static std::atomic<int> line{0};  // ThreadSanitizer knows no fences
  line.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace dtcomm
