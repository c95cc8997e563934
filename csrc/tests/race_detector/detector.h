// Detector: finds data races between lanes. A race is two accesses to a byte, one of them a store, that no order of
// clocks.h separates and that are not both strong. For the accesses of a run the result is exact: it does not depend on
// the order in which the emulator ran the lanes.
//
// Instrumented code reports every access: it is compiled for ThreadSanitizer, and hooks.cpp defines the functions that
// the compiler calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/memory_observer.h"
#include "tests/race_detector/clocks.h"

namespace dtcomm::race_detector {

struct Access {
  const void* site;  // the return address of the access's hook
  unsigned lane;
  std::uint32_t when;
  std::uint8_t bytes;  // a bit for each of a cell's eight
  bool stores, strong;
  Scope scope;
};

// Two accesses in the order of this run. `what` is empty for a race; otherwise it names an error of one access: a store
// to constant memory, a load of a peer's memory, or the use of memory that no lane may use.
struct Race {
  const char* what;
  Access earlier, later;
  std::string where;
};

class Detector : public emulator::MemoryObserver {
 public:
  Detector();
  ~Detector() override;
  Detector(const Detector&) = delete;
  Detector& operator=(const Detector&) = delete;

  // The races found since the last call, one for each pair of sites.
  std::vector<Race> take();
  // A description with the source lines of both sites.
  std::string describe(const Race& race) const;
  // Accesses that were checked, over all runs.
  std::uint64_t accesses() const { return accesses_; }

  void begin(const GridShape& shape) override;
  void end() override;
  void constant(const void* at, std::size_t bytes) override;
  void shared(const void* at, std::size_t bytes, const char* what, unsigned whose) override;
  void pushed(const void* at, std::size_t bytes, const char* what, unsigned whose) override;
  void stacks(const char* at, std::size_t bytes_per_lane) override;
  void enter(unsigned lane) override;
  void leave() override;
  void barrier(const std::vector<unsigned>& lanes) override { clocks_.barrier(lanes); }
  void store(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool release, Scope scope) override;
  void load(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool acquire, Scope scope) override;

  // An access of the lane that is inside.
  void access(const void* at, std::size_t bytes, bool stores, const void* site);

 private:
  struct Region {
    std::uintptr_t from, to;
    bool constant;
    const char* what;
    unsigned whose;
    bool pushed;  // only the rank `whose` loads it
  };
  using Cell = std::vector<Access>;  // accesses to eight bytes that a later one may race with
  static constexpr std::size_t kCell = 8, kPage = 4096;
  struct Page {
    Cell cells[kPage / kCell];
    bool used = false;
  };

  void add_region(const Region& region);
  const Region* region_of(std::uintptr_t at);
  Page& page_of(std::uintptr_t at);
  void record(std::uintptr_t at, std::size_t bytes, Access access, const Region& region);
  void visit(Cell& cell, const Access& access, std::uintptr_t at, const Region& region);
  void check_reader(const Access& access, const Region& region);
  void add(const char* what, const Access& earlier, const Access& later, std::string where);
  std::string name(unsigned lane) const;

  GridShape shape_ = {};
  Clocks clocks_;
  std::vector<Region> regions_;
  bool sorted_ = true;
  std::size_t last_region_ = 0;
  std::unordered_map<std::uintptr_t, std::unique_ptr<Page>> pages_;
  std::vector<Page*> used_;
  std::uintptr_t last_number_ = 0;
  Page* last_page_ = nullptr;
  std::uintptr_t stacks_ = 0;
  std::size_t stack_bytes_ = 0;
  unsigned lane_ = 0;
  std::set<std::pair<const void*, const void*>> sites_;
  std::vector<Race> races_;
  std::uint64_t accesses_ = 0;
};

// The detector that records accesses, while one of its lanes is inside; nullptr otherwise.
extern Detector* inside;

// "function at file:line" of an instruction and of what it was inlined into.
std::string describe_site(const void* site);

}  // namespace dtcomm::race_detector
