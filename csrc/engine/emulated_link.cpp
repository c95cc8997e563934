#include "engine/emulated_link.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>

#include "engine/cpu_relax.h"
#include "engine/process_page.h"

namespace dtcomm {
namespace {

constexpr std::size_t kBusyKept = 512;        // intervals; what came in before them counts as free again
constexpr std::uint64_t kWakeNs = 30 * 1000;  // to wake up takes about as long
constexpr double kLeastToilNs = 5000;         // less is owed until there is more: to read the clock takes a while

std::uint64_t thread_cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace

Nic& Nic::instance(int level) {
  static Nic nics[2];
  return nics[level == 0 ? 0 : 1];
}

std::uint64_t Nic::send(std::uint64_t now, std::uint64_t busy_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t begin = std::max(now, free_);
  free_ = begin + busy_ns;
  return begin;
}

std::uint64_t Nic::receive(std::uint64_t first, std::uint64_t busy_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto at = std::lower_bound(busy_.begin(), busy_.end(), first,
                             [](const Busy& busy, std::uint64_t time) { return busy.end < time; });
  const auto merged = at - busy_.begin();
  std::uint64_t begin = first;
  std::uint64_t end = first;
  if (at != busy_.end() && at->begin <= first) {
    begin = at->begin;
    end = at->end;
    ++at;
  }
  for (std::uint64_t left = busy_ns; left > 0;) {
    if (at == busy_.end() || at->begin - end >= left) {
      end += left;
      break;
    }
    left -= at->begin - end;
    end = at->end;
    ++at;
  }
  const std::uint64_t there = end;
  if (at != busy_.end() && at->begin == end) {
    end = at->end;
    ++at;
  }
  const auto place = busy_.erase(busy_.begin() + merged, at);
  busy_.insert(place, {begin, end});
  if (busy_.size() > kBusyKept) busy_.erase(busy_.begin(), busy_.begin() + kBusyKept / 2);
  return there;
}

Link::Link(LinkRate rate, Nic& nic, int ranks, std::size_t flags)
    : rate_(rate),
      nic_(nic),
      flags_(flags),
      due_(static_cast<std::size_t>(ranks) * flags),
      spared_(static_cast<std::size_t>(ranks)) {}

void Link::toil(int peer, std::size_t bytes) {
  if (spared_[static_cast<std::size_t>(peer)]) return;
  owed_ns_ += static_cast<double>(bytes) * rate_.cpu_ns_per_byte;
  if (owed_ns_ < kLeastToilNs) return;
  const std::uint64_t end = thread_cpu_ns() + static_cast<std::uint64_t>(owed_ns_);
  owed_ns_ = 0;
  while (thread_cpu_ns() < end) cpu_pause();
}

void Link::send(Stamp& stamp, std::uint64_t seq, std::size_t bytes) {
  stamp.first.store(nic_.send(now_ns(), rate_.busy_ns(bytes)) + rate_.latency_ns, std::memory_order_relaxed);
  stamp.seq.store(seq, std::memory_order_release);
}

bool Link::arrived(int peer, std::size_t flag, std::uint64_t seq, const Stamp& stamp, std::size_t bytes) {
  if (stamp.seq.load(std::memory_order_acquire) != seq) return false;  // it was sent to others first
  Due& due = due_[static_cast<std::size_t>(peer) * flags_ + flag];
  if (due.seq != seq) {
    due = {seq, nic_.receive(stamp.first.load(std::memory_order_relaxed), rate_.busy_ns(bytes)), false};
  }
  if (due.at <= now_ns()) {
    if (!due.taken) toil(peer, bytes);
    due.taken = true;
    return true;
  }
  if (due.at < next_.load(std::memory_order_relaxed)) next_.store(due.at, std::memory_order_relaxed);
  return false;
}

std::uint64_t Link::nap(std::uint64_t most) const {
  const std::uint64_t next = next_.load(std::memory_order_relaxed);
  if (next == ~0ull) return most;
  const std::uint64_t now = now_ns();
  return next <= now + kWakeNs ? 0 : std::min(most, next - now - kWakeNs);
}

// The kernel ends this thread's sleeps up to 50 us late otherwise, as long as many a link's latency.
void wake_on_time() {
  thread_local bool set = false;
  if (!set) prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  set = true;
}

}  // namespace dtcomm
