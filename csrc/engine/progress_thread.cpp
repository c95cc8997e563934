#include "engine/progress_thread.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "engine/communicator.h"
#include "engine/platform.h"
#include "net/forked_children.h"

namespace dtcomm {
namespace {

constexpr int kBudget = 64;  // instructions per communicator and poll, so that a long operation does not starve others
constexpr WaitPolicy kMemoryPolicy{8, 50 * 1000};
constexpr WaitPolicy kSocketPolicy{32, 0};  // a frame wakes its sleeper at once, so yielding does not pay

// An eventfd; where a sandbox refuses it, a datagram socket that is connected to itself, which is used alike.
int make_event() {
  const int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event >= 0) return event;
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof(sa_family_t);  // the kernel chooses the name
  auto* own = reinterpret_cast<sockaddr*>(&address);
  if (fd < 0 || bind(fd, own, length) != 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  length = sizeof address;
  if (getsockname(fd, own, &length) != 0 || connect(fd, own, length) != 0) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  return fd;
}

}  // namespace

ProgressThread::ProgressThread() : wake_fd_(make_event()) { close_in_children(wake_fd_); }

ProgressThread::~ProgressThread() { close_unless_in_child(wake_fd_); }

void ProgressThread::add(Communicator* communicator) {
  const std::lock_guard<std::mutex> lock(mutex_);
  communicators_.push_back(communicator);
  if (communicator->peers().has_latency) latency_communicators_.fetch_add(1, std::memory_order_relaxed);
}

void ProgressThread::remove(Communicator* communicator) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(communicators_.begin(), communicators_.end(), communicator);
  if (found == communicators_.end()) return;
  communicators_.erase(found);
  if (communicator->peers().has_latency) latency_communicators_.fetch_sub(1, std::memory_order_relaxed);
}

void ProgressThread::wake() {
  has_work_.store(true, std::memory_order_release);
  full_fence();  // a HelpingWaiter looks for work after it has stopped helping
  if (!rests()) {
    std::unique_lock<std::mutex> lock(idle_mutex_);
    if (start_locked(lock)) idle_.notify_one();
  }
  // The thread, or a waiter that helps it, may sleep because another communicator is blocked.
  LocalProcess::instance().page().wakeup.notify();
  if (sleeps_on_sockets_.load(std::memory_order_relaxed)) eventfd_write(wake_fd_, 1);
}

bool ProgressThread::start() {
  if (runs_.load(std::memory_order_relaxed)) return true;
  std::unique_lock<std::mutex> lock(idle_mutex_);
  return start_locked(lock);
}

bool ProgressThread::start_locked(std::unique_lock<std::mutex>& lock) {
  await_stop(lock);
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { loop(); });
    } catch (const std::system_error&) {  // a limit of processes or of memory; the next call tries again
      return false;
    }
    runs_ = true;
  }
  return true;
}

void ProgressThread::await_stop(std::unique_lock<std::mutex>& lock) {
  while (stopping_) stopped_.wait(lock);
}

void ProgressThread::stop() {
  std::unique_lock<std::mutex> lock(idle_mutex_);
  await_stop(lock);
  if (!thread_.joinable()) return;
  stopping_ = true;
  runs_ = false;
  std::thread thread = std::move(thread_);
  idle_.notify_one();
  lock.unlock();
  LocalProcess::instance().page().wakeup.notify();
  eventfd_write(wake_fd_, 1);
  thread.join();
  lock.lock();
  stopping_ = false;
  stopped_.notify_all();
}

ProgressThread::HelpingWaiter::HelpingWaiter(const Communicator* own) : thread_(ProgressThread::instance()), own_(own) {
  thread_.helping_waiters_.fetch_add(1, std::memory_order_seq_cst);
}

ProgressThread::HelpingWaiter::~HelpingWaiter() {
  thread_.helping_waiters_.fetch_sub(1, std::memory_order_seq_cst);
  bool more = false;
  {
    const std::lock_guard<std::mutex> lock(thread_.mutex_);
    for (Communicator* communicator : thread_.communicators_) more |= communicator->has_undriven_work();
  }
  if (more || (thread_.has_latency() && thread_.has_work_.load(std::memory_order_relaxed))) thread_.wake();
}

bool ProgressThread::HelpingWaiter::advance_others() {
  const std::lock_guard<std::mutex> lock(thread_.mutex_);
  bool moved = false;
  for (Communicator* communicator : thread_.communicators_) {
    if (communicator != own_) moved |= communicator->drive_front(kBudget) == Communicator::DriveResult::moved;
  }
  return moved;
}

void ProgressThread::HelpingWaiter::check_fronts() {
  const std::lock_guard<std::mutex> lock(thread_.mutex_);
  for (Communicator* communicator : thread_.communicators_) communicator->check_front();
}

ProgressThread::AdvanceResult ProgressThread::advance_all(bool before_sleep) {
  const std::lock_guard<std::mutex> lock(mutex_);
  AdvanceResult all;
  max_sleep_ns_ = kSleepNs;
  sleep_fds_.assign(1, {wake_fd_, POLLIN, 0});
  bool shares_memory = false;
  for (Communicator* communicator : communicators_) {
    const Communicator::DriveResult result = communicator->drive_front(kBudget);
    all.moved |= result == Communicator::DriveResult::moved;
    if (result != Communicator::DriveResult::blocked) continue;
    all.blocked = true;
    const PeerSet& peers = communicator->peers();
    max_sleep_ns_ = std::min(max_sleep_ns_, peers.max_sleep_ns(kSleepNs));
    if (before_sleep && !communicator->arm()) max_sleep_ns_ = 0;
    if (peers.has_remote_peers()) sleep_fds_.push_back({peers.epoll_fd(), POLLIN, 0});
    shares_memory |= !peers.has_remote_peers() || peers.is_mixed();
  }
  // Peers in shared memory cannot wake a thread that sleeps on sockets.
  if (sleep_fds_.size() > 1 && shares_memory) max_sleep_ns_ = std::min(max_sleep_ns_, kMixedSleepNs);
  return all;
}

void ProgressThread::loop() {
  Backoff memory_backoff(kMemoryPolicy);
  Backoff socket_backoff(kSocketPolicy);
  const auto reset = [&] {
    memory_backoff.reset();
    socket_backoff.reset();
  };
  WakeupFutex& wakeup = LocalProcess::instance().page().wakeup;
  while (!stopping_.load(std::memory_order_relaxed)) {
    AdvanceResult result;
    const bool called = has_work_.exchange(false, std::memory_order_acquire);
    if (!rests()) result = advance_all(false);
    if (result.moved) {
      reset();
      continue;
    }
    if (!result.blocked) {
      if (called && !rests()) continue;
      std::unique_lock<std::mutex> lock(idle_mutex_);
      idle_.wait(lock, [&] { return (has_work_.load(std::memory_order_relaxed) && !rests()) || stopping_.load(); });
      reset();
      continue;
    }
    const bool on_sockets = sleep_fds_.size() > 1;
    const bool should_sleep = (on_sockets ? socket_backoff : memory_backoff).should_sleep();
    // An emulated link that knows when it delivers decides how long to sleep; otherwise the backoff does.
    if (max_sleep_ns_ == kSleepNs || on_sockets ? !should_sleep : max_sleep_ns_ == 0) continue;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (Communicator* communicator : communicators_) communicator->check_front();
    }
    const ScopedSleeper sleeper(wakeup);
    sleeps_on_sockets_.store(true, std::memory_order_seq_cst);
    const std::uint32_t seen = wakeup.counter.load(std::memory_order_acquire);
    result = advance_all(true);
    if (!result.moved && result.blocked && !has_work_.load(std::memory_order_acquire)) {
      if (sleep_fds_.size() > 1) {
        sleep_until_readable(sleep_fds_.data(), sleep_fds_.size(), max_sleep_ns_);
        eventfd_t calls = 0;
        while (eventfd_read(wake_fd_, &calls) == 0) {
        }
      } else {
        wakeup.wait(seen, max_sleep_ns_);
      }
    }
    sleeps_on_sockets_.store(false, std::memory_order_relaxed);
  }
}

}  // namespace dtcomm
