// Emulated links: a payload that shared memory delivers at once counts as delivered only when it could have arrived
// over a cable of a given bandwidth and latency. Every rank has one full-duplex end of its own, as a network card is.
// Times are those of now_ns(), which all processes of a machine share. The sending and the receiving thread spend the
// CPU time that the kernel's network stack would.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace dtcomm {

struct LinkRate {
  std::uint64_t latency_ns = 0;
  double ns_per_byte = 0;
  double cpu_ns_per_byte = 0;  // at either end

  bool enabled() const { return latency_ns > 0 || ns_per_byte > 0; }
  std::uint64_t transfer_ns(std::size_t bytes) const {
    return static_cast<std::uint64_t>(static_cast<double>(bytes) * ns_per_byte);
  }
};

// One end of a cable, shared by all communicators of the process. A new one is made when all of them have been closed,
// so that messages which closed communicators never delivered do not delay those of later ones.
class EmulatedNic {
 public:
  // This process's card for a level of the hierarchy: 0 inside the host, 1 between hosts.
  static std::shared_ptr<EmulatedNic> shared(int level);

  // Occupies the sending direction for `busy_ns`, behind everything sent earlier; returns when the first byte leaves.
  std::uint64_t send(std::uint64_t now, std::uint64_t busy_ns);
  // Occupies free time of the receiving direction from `first` (when the first byte arrives) on; returns when the last
  // byte has arrived. Messages that are requested out of order share the wire as their packets would.
  std::uint64_t receive(std::uint64_t first, std::uint64_t busy_ns);

 private:
  struct Interval {
    std::uint64_t begin;
    std::uint64_t end;
  };
  std::mutex mutex_;
  std::uint64_t send_free_at_ = 0;
  std::vector<Interval> receiving_;  // sorted and disjoint
};

// When the first byte of a box arrives at one reader; `seq` is that of the box's flag.
struct DeliveryStamp {
  std::atomic<std::uint64_t> seq{0};
  std::atomic<std::uint64_t> first{0};
};

// The link of one communicator at one level of the hierarchy.
class EmulatedLink {
 public:
  EmulatedLink(LinkRate rate, std::shared_ptr<EmulatedNic> nic, int ranks, std::size_t flags);

  // Sends a box of `bytes` bytes: stores in `stamp` when its first byte arrives at the reader.
  void send(DeliveryStamp& stamp, std::uint64_t seq, std::size_t bytes);
  // Whether the box has arrived by now. The first call for a box receives its bytes.
  bool delivered(int peer, std::size_t flag, std::uint64_t seq, const DeliveryStamp& stamp, std::size_t bytes);

  // The connection to `peer` is a real socket, which costs CPU time of its own: none is added here.
  void skip_cpu_time(int peer) { skips_cpu_time_[static_cast<std::size_t>(peer)] = true; }
  // Spends the CPU time of a box that was sent to `peer` or received from it.
  void spend_cpu_time(int peer, std::size_t bytes);

  // Starts a round of calls of delivered().
  void begin_round() { next_delivery_.store(~0ull, std::memory_order_relaxed); }
  // How long the thread may sleep until shortly before the next box of this round arrives, at most `limit`: 0 if one is
  // about to arrive, `limit` if none is known.
  std::uint64_t max_sleep_ns(std::uint64_t limit) const;

 private:
  struct Delivery {
    std::uint64_t seq = 0;
    std::uint64_t at = 0;
    bool paid = false;  // its CPU time has been spent
  };

  LinkRate rate_;
  std::shared_ptr<EmulatedNic> nic_;
  std::size_t flags_;
  std::vector<Delivery> deliveries_;  // by peer and flag
  std::vector<bool> skips_cpu_time_;
  double unspent_cpu_ns_ = 0;
  std::atomic<std::uint64_t> next_delivery_{~0ull};
};

// Makes the kernel end this thread's sleeps on time.
void enable_precise_sleep();

}  // namespace dtcomm
