// How far apart the cores of two ranks are: the round trip of a cache line, measured inside the operations themselves
// because processes move between cores, and virtual cores between real ones, while a job runs.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/shm_layout.h"

namespace dtcomm {

// Ranks (0,1), (2,3), ... bounce a counter through their areas. Both run the probe of the same `number`.
class Probe {
 public:
  static constexpr std::size_t kRounds = 16;

  Probe(int rank, const std::vector<PeerView>& peers, std::uint64_t number);

  enum class State { waiting, met, over };
  // `waiting` while the partner is not there, `met` once when it came or is called (wake it: it may be asleep), then
  // `over`. From then on both only spin; whoever has to wait too long gives up for both.
  State advance();
  int partner() const { return partner_; }
  // Median in ns; 0 where nothing was measured.
  double round_trip_ns() const;

 private:
  std::atomic<std::uint64_t>* mine_ = nullptr;
  std::atomic<std::uint64_t>* theirs_ = nullptr;
  int partner_;
  bool leads_;
  std::uint64_t base_;
  std::size_t round_ = 0;
  bool called_ = false;
  bool met_ = false;
  std::uint64_t last_ = 0;
  std::array<std::uint32_t, kRounds> times_{};
};

}  // namespace dtcomm
