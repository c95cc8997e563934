#include "engine/emulated_link.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <utility>

#include "engine/platform.h"
#include "engine/process_page.h"

namespace dtcomm {
namespace {

constexpr std::size_t kMaxIntervals = 512;    // of received messages; time before the oldest counts as free again
constexpr std::uint64_t kWakeNs = 30 * 1000;  // about how long waking up takes
constexpr double kMinCpuNs = 5000;            // less is accumulated, because reading the clock takes time itself

std::uint64_t thread_cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace

std::shared_ptr<EmulatedNic> EmulatedNic::shared(int level) {
  static std::mutex mutex;
  static std::weak_ptr<EmulatedNic> nics[2];
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<EmulatedNic>& kept = nics[level == 0 ? 0 : 1];
  std::shared_ptr<EmulatedNic> nic = kept.lock();
  if (!nic) kept = nic = std::make_shared<EmulatedNic>();
  return nic;
}

std::uint64_t EmulatedNic::send(std::uint64_t now, std::uint64_t busy_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t begin = std::max(now, send_free_at_);
  send_free_at_ = begin + busy_ns;
  return begin;
}

std::uint64_t EmulatedNic::receive(std::uint64_t first, std::uint64_t busy_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto at = std::lower_bound(receiving_.begin(), receiving_.end(), first,
                             [](const Interval& interval, std::uint64_t time) { return interval.end < time; });
  const auto merged = at - receiving_.begin();
  std::uint64_t begin = first;
  std::uint64_t end = first;
  if (at != receiving_.end() && at->begin <= first) {
    begin = at->begin;
    end = at->end;
    ++at;
  }
  for (std::uint64_t left = busy_ns; left > 0;) {
    if (at == receiving_.end() || at->begin - end >= left) {
      end += left;
      break;
    }
    left -= at->begin - end;
    end = at->end;
    ++at;
  }
  const std::uint64_t last_byte = end;
  if (at != receiving_.end() && at->begin == end) {
    end = at->end;
    ++at;
  }
  const auto place = receiving_.erase(receiving_.begin() + merged, at);
  receiving_.insert(place, {begin, end});
  if (receiving_.size() > kMaxIntervals) receiving_.erase(receiving_.begin(), receiving_.begin() + kMaxIntervals / 2);
  return last_byte;
}

EmulatedLink::EmulatedLink(LinkRate rate, std::shared_ptr<EmulatedNic> nic, int ranks, std::size_t flags)
    : rate_(rate),
      nic_(std::move(nic)),
      flags_(flags),
      deliveries_(static_cast<std::size_t>(ranks) * flags),
      skips_cpu_time_(static_cast<std::size_t>(ranks)) {}

void EmulatedLink::spend_cpu_time(int peer, std::size_t bytes) {
  if (skips_cpu_time_[static_cast<std::size_t>(peer)]) return;
  unspent_cpu_ns_ += static_cast<double>(bytes) * rate_.cpu_ns_per_byte;
  if (unspent_cpu_ns_ < kMinCpuNs) return;
  const std::uint64_t end = thread_cpu_ns() + static_cast<std::uint64_t>(unspent_cpu_ns_);
  unspent_cpu_ns_ = 0;
  while (thread_cpu_ns() < end) cpu_relax();
}

void EmulatedLink::send(DeliveryStamp& stamp, std::uint64_t seq, std::size_t bytes) {
  stamp.first.store(nic_->send(now_ns(), rate_.transfer_ns(bytes)) + rate_.latency_ns, std::memory_order_relaxed);
  stamp.seq.store(seq, std::memory_order_release);
}

bool EmulatedLink::delivered(int peer, std::size_t flag, std::uint64_t seq, const DeliveryStamp& stamp,
                             std::size_t bytes) {
  if (stamp.seq.load(std::memory_order_acquire) != seq) return false;  // so far it was sent to other readers only
  Delivery& delivery = deliveries_[static_cast<std::size_t>(peer) * flags_ + flag];
  if (delivery.seq != seq) {
    delivery = {seq, nic_->receive(stamp.first.load(std::memory_order_relaxed), rate_.transfer_ns(bytes)), false};
  }
  if (delivery.at <= now_ns()) {
    if (!delivery.paid) spend_cpu_time(peer, bytes);
    delivery.paid = true;
    return true;
  }
  if (delivery.at < next_delivery_.load(std::memory_order_relaxed))
    next_delivery_.store(delivery.at, std::memory_order_relaxed);
  return false;
}

std::uint64_t EmulatedLink::max_sleep_ns(std::uint64_t limit) const {
  const std::uint64_t next = next_delivery_.load(std::memory_order_relaxed);
  if (next == ~0ull) return limit;
  const std::uint64_t now = now_ns();
  return next <= now + kWakeNs ? 0 : std::min(limit, next - now - kWakeNs);
}

// By default the kernel may end a sleep 50 us late, which is as long as the latency of many links.
void enable_precise_sleep() {
  thread_local bool set = false;
  if (!set) prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  set = true;
}

}  // namespace dtcomm
