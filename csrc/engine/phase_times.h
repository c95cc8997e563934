// Where an operation's time goes, for timelines. Nobody looks at a clock unless timelines are wanted.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dtcomm {

enum class Phase : std::uint8_t { encode = 0, reduce = 1, decode = 2 };

// Of one phase in all pieces: the first begin, the last end, and how long it ran in between.
struct Busy {
  std::uint64_t begin_ns = 0;  // 0: it did not take place
  std::uint64_t end_ns = 0;
  std::uint64_t ns = 0;
};

class Times {
 public:
  void add(Phase phase, std::uint64_t begin, std::uint64_t end) {
    Busy& busy = phases_[static_cast<std::size_t>(phase)];
    if (busy.begin_ns == 0) busy.begin_ns = begin;
    busy.end_ns = end;
    busy.ns += end - begin;
  }
  const std::array<Busy, 3>& phases() const { return phases_; }

  // Whether the operations that start from now on take their times.
  static std::atomic<bool>& wanted() {
    static std::atomic<bool> flag{false};
    return flag;
  }

 private:
  std::array<Busy, 3> phases_{};
};

}  // namespace dtcomm
