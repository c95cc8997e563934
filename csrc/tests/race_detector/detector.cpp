#include "tests/race_detector/detector.h"

#include <algorithm>

namespace dtcomm::race_detector {

Detector* inside = nullptr;

Detector::Detector() = default;
Detector::~Detector() = default;

std::vector<Race> Detector::take() {
  sites_.clear();
  return std::exchange(races_, {});
}

void Detector::begin(const GridShape& shape) {
  shape_ = shape;
  clocks_.begin(shape);
  // Lanes call leave() through this object and its virtual table.
  constant(this, sizeof *this);
  constant(*reinterpret_cast<void* const*>(static_cast<emulator::MemoryObserver*>(this)), 16 * sizeof(void*));
}

void Detector::end() {
  regions_.clear();
  for (Page* page : used_) {
    for (Cell& cell : page->cells) cell.clear();
    page->used = false;
  }
  used_.clear();
  last_page_ = nullptr;
  stacks_ = stack_bytes_ = 0;
}

void Detector::constant(const void* at, std::size_t bytes) {
  const auto from = reinterpret_cast<std::uintptr_t>(at);
  add_region({from, from + bytes, true, "constant memory", 0, false});
}

void Detector::shared(const void* at, std::size_t bytes, const char* what, unsigned whose) {
  const auto from = reinterpret_cast<std::uintptr_t>(at);
  add_region({from, from + bytes, false, what, whose, false});
}

void Detector::pushed(const void* at, std::size_t bytes, const char* what, unsigned whose) {
  const auto from = reinterpret_cast<std::uintptr_t>(at);
  add_region({from, from + bytes, false, what, whose, true});
}

void Detector::add_region(const Region& region) {
  if (region.from == region.to) return;
  regions_.push_back(region);
  sorted_ = false;
}

void Detector::stacks(const char* at, std::size_t bytes_per_lane) {
  stacks_ = reinterpret_cast<std::uintptr_t>(at);
  stack_bytes_ = bytes_per_lane;
}

void Detector::enter(unsigned lane) {
  lane_ = lane;
  inside = this;
}

void Detector::leave() { inside = nullptr; }

void Detector::store(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool release, Scope scope) {
  const auto at = reinterpret_cast<std::uintptr_t>(word);
  const Region* region = region_of(at);
  const Access access{__builtin_return_address(0), lane, clocks_.now(lane), 0, true, true, scope};
  if (region) record(at, sizeof *word, access, *region);
  clocks_.store(lane, word, value, release, scope);
}

void Detector::load(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool acquire, Scope scope) {
  const auto at = reinterpret_cast<std::uintptr_t>(word);
  const Region* region = region_of(at);
  const Access access{__builtin_return_address(0), lane, clocks_.now(lane), 0, false, true, scope};
  if (region) {
    check_reader(access, *region);
    record(at, sizeof *word, access, *region);
  }
  clocks_.load(lane, word, value, acquire, scope);
}

void Detector::access(const void* address, std::size_t bytes, bool stores, const void* site) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t own = stacks_ + lane_ * stack_bytes_;
  if (at >= own && at < own + stack_bytes_) return;
  ++accesses_;
  const Access access{site, lane_, clocks_.now(lane_), 0, stores, false, Scope::block};
  const Region* region = region_of(at);
  if (!region || at + bytes > region->to) {
    add("memory that is not a lane's to use", access, access, region ? region->what : "");
  } else if (region->constant) {
    if (stores) add("constant memory is written", access, access, region->what);
  } else {
    if (!stores) check_reader(access, *region);
    record(at, bytes, access, *region);
  }
}

void Detector::check_reader(const Access& access, const Region& region) {
  if (!region.pushed || access.lane / shape_.threads / shape_.blocks == region.whose) return;
  add("memory of a peer is loaded", access, access,
      std::string(region.what) + " of rank " + std::to_string(region.whose));
}

const Detector::Region* Detector::region_of(std::uintptr_t at) {
  const auto holds = [&](const Region& region) { return at >= region.from && at < region.to; };
  if (last_region_ < regions_.size() && holds(regions_[last_region_])) return &regions_[last_region_];
  if (!sorted_) {
    std::sort(regions_.begin(), regions_.end(), [](const Region& a, const Region& b) { return a.from < b.from; });
    sorted_ = true;
  }
  auto after = std::upper_bound(regions_.begin(), regions_.end(), at,
                                [](std::uintptr_t address, const Region& region) { return address < region.from; });
  if (after == regions_.begin() || !holds(*--after)) return nullptr;
  last_region_ = static_cast<std::size_t>(after - regions_.begin());
  return &*after;
}

Detector::Page& Detector::page_of(std::uintptr_t at) {
  const std::uintptr_t number = at / kPage;
  if (last_page_ && number == last_number_) return *last_page_;
  std::unique_ptr<Page>& page = pages_[number];
  if (!page) page = std::make_unique<Page>();
  if (!page->used) used_.push_back(page.get());
  page->used = true;
  last_number_ = number;
  last_page_ = page.get();
  return *page;
}

void Detector::record(std::uintptr_t at, std::size_t bytes, Access access, const Region& region) {
  while (bytes > 0) {
    const std::size_t within = at % kCell, count = std::min(bytes, kCell - within);
    access.bytes = static_cast<std::uint8_t>(((1U << count) - 1) << within);
    visit(page_of(at).cells[at % kPage / kCell], access, at, region);
    at += count;
    bytes -= count;
  }
}

void Detector::visit(Cell& cell, const Access& access, std::uintptr_t at, const Region& region) {
  // An access that repeats one of the same lane at the same time has been compared already.
  const auto is_repeated = [&](const Access& old) {
    return old.lane == access.lane && old.when == access.when && (old.bytes & access.bytes) == access.bytes &&
           (old.stores || !access.stores) && old.strong == access.strong;
  };
  if (!cell.empty() && is_repeated(cell.back())) return;
  for (std::size_t i = 0; i < cell.size();) {
    const Access& old = cell[i];
    if (is_repeated(old)) return;
    const bool ordered = clocks_.before(old.lane, old.when, access.lane);
    const bool conflict = (old.bytes & access.bytes) != 0 && (old.stores || access.stores);
    if (!ordered && conflict &&
        !(old.strong && access.strong && clocks_.mutual(old.lane, old.scope, access.lane, access.scope))) {
      add("", old, access,
          std::string(region.what) + " " + std::to_string(region.whose) + ", byte " + std::to_string(at - region.from));
    }
    // A later access that races with `old` races with this one, too, unless this one only reads or is strong.
    const bool replaced =
        (old.bytes & access.bytes) == old.bytes && (access.stores || !old.stores) && (old.strong || !access.strong);
    if (ordered && replaced) {
      cell[i] = cell.back();
      cell.pop_back();
    } else {
      ++i;
    }
  }
  cell.push_back(access);
}

void Detector::add(const char* what, const Access& earlier, const Access& later, std::string where) {
  if (sites_.insert({earlier.site, later.site}).second) races_.push_back({what, earlier, later, std::move(where)});
}

}  // namespace dtcomm::race_detector
