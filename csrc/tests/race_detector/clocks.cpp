#include "tests/race_detector/clocks.h"

#include <algorithm>

namespace dtcomm::race_detector {

namespace {

void raise(std::vector<std::uint32_t>& to, const std::vector<std::uint32_t>& from) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], from[i]);
}

}  // namespace

void Clocks::begin(const emulator::MemoryObserver::GridShape& shape) {
  shape_ = shape;
  now_.assign(shape.lanes, 1);
  seen_.assign(shape.lanes, std::make_shared<const Vector>(shape.lanes, 0));
  stores_.clear();
}

bool Clocks::reaches(Scope scope, unsigned lane, unsigned other) const {
  if (scope == Scope::system) return true;
  const unsigned within = scope == Scope::block ? shape_.threads : shape_.threads * shape_.blocks;
  return lane / within == other / within;
}

void Clocks::barrier(const std::vector<unsigned>& lanes) {
  auto all = std::make_shared<Vector>(*seen_[lanes[0]]);
  std::vector<const Vector*> joined = {seen_[lanes[0]].get()};
  for (const unsigned lane : lanes) {
    const Vector* vector = seen_[lane].get();
    if (std::find(joined.begin(), joined.end(), vector) != joined.end()) continue;
    joined.push_back(vector);
    raise(*all, *vector);
  }
  for (const unsigned lane : lanes) (*all)[lane] = now_[lane]++;
  for (const unsigned lane : lanes) seen_[lane] = all;
}

void Clocks::store(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool release, Scope scope) {
  stores_[word].push_back({value, lane, release, scope, now_[lane], seen_[lane]});
  if (release) ++now_[lane];
}

void Clocks::load(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool acquire, Scope scope) {
  const auto stores = stores_.find(word);
  if (!acquire || stores == stores_.end()) return;
  for (const Store& store : stores->second) {
    if (static_cast<std::int32_t>(store.value - value) < 0) continue;
    if (!store.release || store.lane == lane || !mutual(lane, scope, store.lane, store.scope)) return;
    auto seen = std::make_shared<Vector>(*seen_[lane]);
    raise(*seen, *store.seen);
    (*seen)[store.lane] = std::max((*seen)[store.lane], store.when);
    seen_[lane] = seen;
    return;
  }
}

}  // namespace dtcomm::race_detector
