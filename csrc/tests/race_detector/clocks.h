// Clocks: the happens-before order, with a vector clock for each lane, as in DJIT+ and FastTrack (Flanagan and Freund
// 2009). Lanes that have passed a barrier share one vector, so that a barrier costs one vector.
//
// Orders are those of PTX's memory model: the program's within a lane; barriers; and a strong load that acquires,
// after the strong store whose value it read, if the store releases and the scope of each contains the other's lane.
// The orders are transitive (cumulativity). The detector ignores which value a load read in this run: on a device it
// may read any value that ends the wait, so the oldest such store is taken.
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

  // A lane's own time, which its next accesses have.
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
  std::vector<std::shared_ptr<const Vector>> seen_;  // by lane: the time up to which it has seen every other lane
  std::unordered_map<const std::uint32_t*, std::vector<Store>> stores_;
};

}  // namespace dtcomm::race_detector
