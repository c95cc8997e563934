// What has happened before what: a vector clock for each lane, as DJIT+ and FastTrack keep them (Flanagan and Freund
// 2009). Lanes that have met at a barrier share one vector, so that a barrier costs what one vector does.
//
// Orders are those of PTX's memory model: the program's within a lane; barriers; and a strong load that acquires,
// after the strong store whose value it read, if that releases and the scope of each holds the other. They go on
// through each other (cumulativity). The detector does not ask which value a load happened to read here: a device may
// give it any that is good enough, so the oldest of them is taken.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "emulator/memory_observer.h"

namespace dtcomm::race_detector {

using emulator::Scope;

class Clocks {
 public:
  void begin(const emulator::MemoryObserver::GridShape& shape);

  // A lane's own time; what it does has this date.
  std::uint32_t now(unsigned lane) const { return now_[lane]; }
  // Whether what `other` did at `when` comes before all that `lane` does from now on.
  bool before(unsigned other, std::uint32_t when, unsigned lane) const {
    return other == lane || when <= (*seen_[lane])[other];
  }
  // Whether each of two strong accesses reaches the other's lane.
  bool mutual(unsigned lane, Scope scope, unsigned other, Scope others) const {
    return reaches(scope, lane, other) && reaches(others, lane, other);
  }

  void barrier(const std::vector<unsigned>& lanes);
  void store(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool release, Scope scope);
  void load(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool acquire, Scope scope);

 private:
  using Vector = std::vector<std::uint32_t>;
  struct Store {
    std::uint32_t value;
    unsigned lane;
    bool release;
    Scope scope;
    std::uint32_t when;
    std::shared_ptr<const Vector> seen;
  };

  bool reaches(Scope scope, unsigned lane, unsigned other) const;

  emulator::MemoryObserver::GridShape shape_ = {};
  Vector now_;
  std::vector<std::shared_ptr<const Vector>> seen_;  // by lane: how much of every other one
  std::unordered_map<const std::uint32_t*, std::vector<Store>> stores_;
};

}  // namespace dtcomm::race_detector
