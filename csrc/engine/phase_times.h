// How long an operation encodes, reduces and decodes, for timelines. The clock is read only while timelines are on.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dtcomm {

enum class Phase : std::uint8_t { encode = 0, reduce = 1, decode = 2 };

// One phase over all pieces: its first begin, its last end, and the time spent in it between the two.
struct PhaseTime {
  std::uint64_t begin_ns = 0;  // 0: the phase did not take place
  std::uint64_t end_ns = 0;
  std::uint64_t busy_ns = 0;
};

class PhaseTimes {
 public:
  void add(Phase phase, std::uint64_t begin, std::uint64_t end) {
    PhaseTime& time = phases_[static_cast<std::size_t>(phase)];
    if (time.begin_ns == 0) time.begin_ns = begin;
    time.end_ns = end;
    time.busy_ns += end - begin;
  }
  const std::array<PhaseTime, 3>& phases() const { return phases_; }

  // Whether operations that start from now on are timed.
  static std::atomic<bool>& enabled() {
    static std::atomic<bool> flag{false};
    return flag;
  }

 private:
  std::array<PhaseTime, 3> phases_{};
};

}  // namespace dtcomm
