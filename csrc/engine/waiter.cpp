#include "engine/waiter.h"

#include <sched.h>

#include "engine/platform.h"

namespace dtcomm {

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
