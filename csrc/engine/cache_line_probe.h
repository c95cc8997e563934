// Measures how far apart the cores of two ranks are: the round-trip time of a cache line. It is measured inside
// operations because the scheduler moves processes between cores, and virtual cores between real ones, during a job.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/shm_layout.h"

namespace dtcomm {

// Ranks (0,1), (2,3), ... pass a counter to and fro through their shared regions. Both run the probe of the same
// operation `number`.
class CacheLineProbe {
 public:
  static constexpr std::size_t kRounds = 16;

  CacheLineProbe(int rank, const std::vector<PeerView>& peers, std::uint64_t number);

  // waiting: the partner has not started its probe. signalled: this rank has just stored its first value; the caller
  // must wake the partner, which may be asleep. finished: the measurement is over; it spins from `signalled` on, and
  // the rank that waits too long gives up for both.
  enum class State { waiting, signalled, finished };
  State advance();
  int partner() const { return partner_; }
  // The median in ns; 0 if nothing was measured.
  double round_trip_ns() const;

 private:
  std::atomic<std::uint64_t>* own_counter_ = nullptr;
  std::atomic<std::uint64_t>* partner_counter_ = nullptr;
  int partner_;
  bool leads_;
  std::uint64_t base_;
  std::size_t round_ = 0;
  bool signalled_ = false;
  bool partner_started_ = false;
  std::uint64_t last_ns_ = 0;
  std::array<std::uint32_t, kRounds> times_{};
};

}  // namespace dtcomm
