#include "cpu/core_to_core_latency.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

namespace dtcomm {
namespace {

struct alignas(128) Line {
  std::atomic<unsigned> value{0};
};

bool pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof(set), &set) == 0;
}

// Waits until `line` holds `wanted`; false if the other side failed.
bool await(const Line& line, unsigned wanted, const std::atomic<bool>& failed) {
  while (line.value.load(std::memory_order_acquire) != wanted) {
    if (failed.load(std::memory_order_relaxed)) return false;
  }
  return true;
}

}  // namespace

double round_trip_ns(int cpu_a, int cpu_b, int batches, int trips) {
  Line line;
  std::atomic<bool> failed{false};
  std::vector<double> nanoseconds(static_cast<std::size_t>(batches));
  const unsigned total = static_cast<unsigned>(batches) * static_cast<unsigned>(trips);
  std::thread echo([&] {
    if (!pin(cpu_b)) failed = true;
    for (unsigned i = 0; i < total && await(line, 2 * i + 1, failed); ++i) {
      line.value.store(2 * i + 2, std::memory_order_release);
    }
  });
  std::thread caller([&] {
    if (!pin(cpu_a)) failed = true;
    unsigned i = 0;
    for (double& each : nanoseconds) {
      const auto start = std::chrono::steady_clock::now();
      for (int trip = 0; trip < trips; ++trip, ++i) {
        line.value.store(2 * i + 1, std::memory_order_release);
        if (!await(line, 2 * i + 2, failed)) return;
      }
      const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
      each = took.count() / trips;
    }
  });
  caller.join();
  echo.join();
  if (failed) return -1;
  const auto tenth = nanoseconds.begin() + batches / 10;
  std::nth_element(nanoseconds.begin(), tenth, nanoseconds.end());
  return *tenth;
}

}  // namespace dtcomm
