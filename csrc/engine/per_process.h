// Objects of which a process has one.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>

namespace dtcomm {

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
