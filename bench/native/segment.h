// The shared segment of the yardstick: flags, boxes, ring slots and room for tensors, and how a rank waits.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>

namespace yardstick {

constexpr int kMaxRanks = 8;
constexpr std::size_t kFlagBytes = 128;  // two lines: the neighbouring line is prefetched with the first
constexpr std::size_t kBoxBytes = std::size_t{1} << 20;
constexpr std::size_t kSkew = std::size_t{276} << 10;  // equal addresses modulo the cache cost 2-7x

// A count that one rank raises and the others wait for; compared modulo 2^32.
struct alignas(kFlagBytes) Flag {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;

  bool reached(std::uint32_t target) const {
    return static_cast<std::int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
  }

  // A sleeper that registers between the store and the load is missed here; its own timeout wakes it, so that
  // the common case pays for no fence.
  void raise(std::uint32_t to) {
    value.store(to, std::memory_order_release);
    if (sleepers.load(std::memory_order_relaxed) != 0) {
      syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  void wait(std::uint32_t target, std::uint32_t spins, std::uint32_t yields) {
    for (std::uint32_t i = 0; i < spins; ++i) {
      if (reached(target)) return;
      __builtin_ia32_pause();
    }
    for (std::uint32_t i = 0; i < yields; ++i) {
      if (reached(target)) return;
      sched_yield();
    }
    const timespec millisecond{0, 1000000};
    sleepers.fetch_add(1);
    for (std::uint32_t seen = value.load(); !reached(target); seen = value.load()) {
      syscall(SYS_futex, &value, FUTEX_WAIT, seen, &millisecond, nullptr, 0);
    }
    sleepers.fetch_sub(1);
  }
};

struct RankFlags {
  Flag barrier, boxed, entered, left, staged, reduced, done;
};

// header | boxes: [rank][parity] | rings: [rank][slot] | tensors: [rank], each rank's part skewed
struct Layout {
  int ranks = 0;
  std::size_t ring_bytes = 0;
  std::size_t tensor_bytes = 0;

  std::size_t boxes() const { return 1 << 16; }
  std::size_t box_stride() const { return 2 * kBoxBytes + kSkew; }
  std::size_t rings() const { return boxes() + ranks * box_stride(); }
  std::size_t ring_stride() const { return ring_bytes + kSkew; }
  std::size_t tensors() const { return rings() + ranks * ring_stride(); }
  std::size_t tensor_stride() const { return tensor_bytes + kSkew; }
  std::size_t total() const { return tensors() + ranks * tensor_stride(); }
};

static_assert(sizeof(RankFlags) * kMaxRanks <= (1 << 16), "the flags must fit in the header");

}  // namespace yardstick
