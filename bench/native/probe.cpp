// Whether two CPUs share one core's units. How far apart they are is measured by csrc/cpu/core_to_core_latency.h.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace {

bool pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof(set), &set) == 0;
}

// Seconds for work that keeps the vector multipliers of one core busy and touches no memory.
double multiply() {
  using Eight = float __attribute__((vector_size(32)));
  Eight lanes[8];
  for (int i = 0; i < 8; ++i) lanes[i] = Eight{} + static_cast<float>(i + 1);
  const auto start = std::chrono::steady_clock::now();
  for (int k = 0; k < 100'000; ++k) {
    for (Eight& lane : lanes) {
      lane *= 0.9999F;
      asm volatile("" : "+x"(lane));
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return took.count();
}

}  // namespace

// How much longer such work takes on `cpu_a` while `cpu_b` does the same: about 1 for two cores, nearly 2 for two
// threads of one. The best of `trials`, since other load can only add. Negative where a thread could not be pinned.
extern "C" double contention(int cpu_a, int cpu_b, int trials) {
  std::atomic<bool> failed{false}, stop{false};
  double alone = 1e9, together = 1e9;
  std::thread([&] {
    if (!pin(cpu_a)) failed = true;
    for (int i = 0; i < trials; ++i) alone = std::min(alone, multiply());
  }).join();
  std::thread other([&] {
    if (!pin(cpu_b)) failed = true;
    while (!stop) multiply();
  });
  std::thread([&] {
    if (!pin(cpu_a)) failed = true;
    for (int i = 0; i < trials; ++i) together = std::min(together, multiply());
  }).join();
  stop = true;
  other.join();
  return failed ? -1 : together / alone;
}
