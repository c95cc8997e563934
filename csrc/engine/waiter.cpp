#include "engine/waiter.h"

#include <sched.h>

#include <atomic>

#include "engine/platform.h"

namespace dtcomm {
namespace {

std::atomic<InterruptCheck> interrupt_check{nullptr};

}  // namespace

void set_interrupt_check(InterruptCheck check) { interrupt_check.store(check, std::memory_order_release); }

bool InterruptWatch::interrupted() {
  const std::uint64_t now = now_ns();
  const bool is_due = next_ns_ != 0 && now >= next_ns_;
  if (is_due || next_ns_ == 0) next_ns_ = now + kIntervalNs;
  const InterruptCheck check = is_due ? interrupt_check.load(std::memory_order_acquire) : nullptr;
  return check && check();
}

bool Backoff::should_sleep() {
  if (polls_ < policy_.spins) {
    ++polls_;
    cpu_relax();
    return false;
  }
  const std::uint64_t now = now_ns();
  if (yielding_since_ == 0) yielding_since_ = now;
  if (now - yielding_since_ >= policy_.yield_ns) return true;
  sched_yield();
  return false;
}

}  // namespace dtcomm
