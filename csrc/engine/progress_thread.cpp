#include "engine/progress_thread.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "engine/communicator.h"
#include "engine/cpu_relax.h"
#include "net/epoll_set.h"

namespace dtcomm {
namespace {

constexpr int kBudget = 64;  // instructions per look, so that one long operation does not starve the others
constexpr int kSpins = 8;    // looks around all communicators
constexpr int kSocketSpins = 32;
constexpr std::uint64_t kYieldNs = 50 * 1000;
constexpr std::uint64_t kMixedNs = 200 * 1000;  // over sockets, while peers in shared memory may ring too

}  // namespace

ProgressThread::ProgressThread() : call_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (call_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

ProgressThread& ProgressThread::instance() {
  static std::mutex mutex;
  static std::atomic<ProgressThread*> current{nullptr};
  static std::atomic<int> owner{0};
  const int pid = static_cast<int>(getpid());
  if (owner.load(std::memory_order_acquire) == pid) return *current.load(std::memory_order_acquire);
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner.load() != pid) {
    current = new ProgressThread;  // a forked child has no threads: its parent's object is left alone
    owner.store(pid, std::memory_order_release);
  }
  return *current.load();
}

void ProgressThread::add(Communicator* communicator) {
  const std::lock_guard<std::mutex> lock(mutex_);
  communicators_.push_back(communicator);
  if (communicator->wired) wired_.fetch_add(1, std::memory_order_relaxed);
}

void ProgressThread::remove(Communicator* communicator) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(communicators_.begin(), communicators_.end(), communicator);
  if (found == communicators_.end()) return;
  communicators_.erase(found);
  if (communicator->wired) wired_.fetch_sub(1, std::memory_order_relaxed);
}

void ProgressThread::wake() {
  work_.store(true, std::memory_order_release);
  full_fence();  // whoever relieves this thread looks for work after he has said that he does not any more
  if (!rests()) {
    const std::lock_guard<std::mutex> lock(idle_mutex_);
    if (!thread_.joinable()) {
      stopping_ = false;
      thread_ = std::thread([this] { loop(); });
    }
    idle_.notify_one();
  }
  // It, or who relieves it, may be asleep over another communicator's operation.
  Process::instance().page().bell.ring();
  if (over_sockets_.load(std::memory_order_relaxed)) eventfd_write(call_, 1);
}

void ProgressThread::stop() {
  std::thread thread;
  {
    const std::lock_guard<std::mutex> lock(idle_mutex_);
    stopping_ = true;
    thread.swap(thread_);
    idle_.notify_one();
  }
  Process::instance().page().bell.ring();
  eventfd_write(call_, 1);
  if (thread.joinable()) thread.join();
}

ProgressThread::Relief::Relief(const Communicator* own) : thread_(ProgressThread::instance()), own_(own) {
  thread_.reliefs_.fetch_add(1, std::memory_order_seq_cst);
}

ProgressThread::Relief::~Relief() {
  thread_.reliefs_.fetch_sub(1, std::memory_order_seq_cst);
  bool more = false;
  {
    const std::lock_guard<std::mutex> lock(thread_.mutex_);
    for (Communicator* communicator : thread_.communicators_) more |= communicator->has_work();
  }
  if (more || (thread_.wired() && thread_.work_.load(std::memory_order_relaxed))) thread_.wake();
}

bool ProgressThread::Relief::look() {
  const std::lock_guard<std::mutex> lock(thread_.mutex_);
  bool moved = false;
  for (Communicator* communicator : thread_.communicators_) {
    if (communicator != own_) moved |= communicator->drive_front(kBudget) == Communicator::Look::moved;
  }
  return moved;
}

void ProgressThread::Relief::watch() {
  const std::lock_guard<std::mutex> lock(thread_.mutex_);
  for (Communicator* communicator : thread_.communicators_) communicator->watch_front();
}

// One look at every communicator; true where any moved.
bool ProgressThread::look_around(bool& blocked) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bool moved = false;
  blocked = false;
  nap_ = kSleepNs;
  wires_.assign(1, call_);
  bool rings = false;
  for (Communicator* communicator : communicators_) {
    const Communicator::Look look = communicator->drive_front(kBudget);
    moved |= look == Communicator::Look::moved;
    blocked |= look == Communicator::Look::blocked;
    if (look != Communicator::Look::blocked) continue;
    nap_ = std::min(nap_, communicator->nap(kSleepNs));
    const int wire = communicator->wire();
    if (wire >= 0) wires_.push_back(wire);
    rings |= wire < 0 || communicator->mixed();
  }
  if (wires_.size() > 1 && rings) nap_ = std::min(nap_, kMixedNs);
  return moved;
}

void ProgressThread::loop() {
  Patience patience(kSpins, kYieldNs);
  Patience over_sockets(kSocketSpins, 0);  // they wake their sleeper
  Bell& bell = Process::instance().page().bell;
  while (!stopping_.load(std::memory_order_relaxed)) {
    bool blocked = false;
    const bool called = work_.exchange(false, std::memory_order_acquire);
    if (!rests() && look_around(blocked)) {
      patience.moved();
      over_sockets.moved();
      continue;
    }
    if (!blocked) {
      if (called && !rests()) continue;
      std::unique_lock<std::mutex> lock(idle_mutex_);
      idle_.wait(lock, [&] { return (work_.load(std::memory_order_relaxed) && !rests()) || stopping_.load(); });
      patience.moved();
      over_sockets.moved();
      continue;
    }
    const bool tired = (wires_.size() > 1 ? over_sockets : patience).exhausted();
    if (nap_ == kSleepNs || wires_.size() > 1 ? !tired : nap_ == 0) continue;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (Communicator* communicator : communicators_) communicator->watch_front();
    }
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    over_sockets_.store(true, std::memory_order_seq_cst);
    const std::uint32_t seen = bell.word.load(std::memory_order_acquire);
    if (!look_around(blocked) && blocked && !work_.load(std::memory_order_acquire)) {
      if (wires_.size() > 1) {
        sleep_on(wires_.data(), wires_.size(), nap_);
        eventfd_t calls = 0;
        eventfd_read(call_, &calls);
      } else {
        bell.sleep(seen, nap_);
      }
    }
    over_sockets_.store(false, std::memory_order_relaxed);
    bell.sleepers.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace dtcomm
