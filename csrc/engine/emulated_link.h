// An emulated link: bytes that lie in shared memory at once count as delivered when they could have come over a cable
// of a given rate and latency. Every rank has one full-duplex end of its own, as a network card is; times are those of
// now_ns(), which all processes of a machine share. Who sends or receives spends the CPU time on it that a kernel's
// network stack would.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace dtcomm {

struct LinkRate {
  std::uint64_t latency_ns = 0;
  double ns_per_byte = 0;
  double cpu_ns_per_byte = 0;  // of either end

  bool on() const { return latency_ns > 0 || ns_per_byte > 0; }
  std::uint64_t busy_ns(std::size_t bytes) const {
    return static_cast<std::uint64_t>(static_cast<double>(bytes) * ns_per_byte);
  }
};

// One end of a cable, shared by all communicators of the process.
class Nic {
 public:
  // This process's, one for each level of the hierarchy (0 inside the host, 1 between hosts).
  static Nic& instance(int level);

  // Takes the wire for so long, behind what is being sent already; returns when the first byte leaves.
  std::uint64_t send(std::uint64_t now, std::uint64_t busy_ns);
  // Takes what the wire has free from `first` on, when the first byte comes in; returns when the last one is there.
  // Messages that are asked for in another order than they came share the wire as their packets would.
  std::uint64_t receive(std::uint64_t first, std::uint64_t busy_ns);

 private:
  struct Busy {
    std::uint64_t begin;
    std::uint64_t end;
  };
  std::mutex mutex_;
  std::uint64_t free_ = 0;
  std::vector<Busy> busy_;  // in order, disjoint
};

// When the first byte of a box comes in at one reader; `seq` as in the box's flag.
struct Stamp {
  std::atomic<std::uint64_t> seq{0};
  std::atomic<std::uint64_t> first{0};
};

// What a communicator sees of the link.
class Link {
 public:
  Link(LinkRate rate, Nic& nic, int ranks, std::size_t flags);

  void send(Stamp& stamp, std::uint64_t seq, std::size_t bytes);
  // Whether the box is there by now; asks for its bytes at the first look.
  bool arrived(int peer, std::size_t flag, std::uint64_t seq, const Stamp& stamp, std::size_t bytes);

  // This end of the way to `peer` costs CPU time of its own: nothing is added.
  void spare(int peer) { spared_[static_cast<std::size_t>(peer)] = true; }
  // After a box was sent to `peer`.
  void sent(int peer, std::size_t bytes) { toil(peer, bytes); }

  // Before a round of looks.
  void look() { next_.store(~0ull, std::memory_order_relaxed); }
  // Until shortly before the next box that was looked for comes in; 0: it is about to, `most`: none is known.
  std::uint64_t nap(std::uint64_t most) const;

 private:
  struct Due {
    std::uint64_t seq = 0;
    std::uint64_t at = 0;
    bool taken = false;  // its bytes have cost what they cost
  };
  void toil(int peer, std::size_t bytes);

  LinkRate rate_;
  Nic& nic_;
  std::size_t flags_;
  std::vector<Due> due_;  // by peer and flag
  std::vector<bool> spared_;
  double owed_ns_ = 0;
  std::atomic<std::uint64_t> next_{~0ull};
};

// Lets this thread's sleeps end when they should.
void wake_on_time();

}  // namespace dtcomm
