// Fuzzes the granules of weight deltas with hostile ones: encodings with flipped bits, cut, and random bytes, without
// the checksums that would refuse them first. All kernels must refuse the same ones, decode the others to the same
// weights, and touch no byte outside their buffers. Undamaged granules must give the new weights.
//
//   fuzz_weight_delta_test [CASES [SEED]]    5,000 cases without arguments
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/kernels.h"
#include "tests/fuzz_payloads.h"
#include "tests/guard_pages.h"

namespace {

using namespace dtcomm;
using namespace dtcomm::tests;
using Bytes = std::vector<std::uint8_t>;

[[noreturn]] void fail(std::size_t at, const char* kernel, const char* what) {
  std::fprintf(stderr, "FAILED: case %zu: %s: %s\n", at, kernel, what);
  std::exit(1);
}

// Changes some elements by some units, or bytes at random.
void change(Random& random, unsigned size, Bytes& weights) {
  const std::size_t n = weights.size() / size;
  const std::size_t changes = random.one_in(4) ? random.below(n + 1) : random.below(n / 20 + 2);
  for (std::size_t i = 0; i < changes; ++i) {
    std::uint8_t* const element = weights.data() + random.below(n) * size;
    std::uint32_t value = 0;
    std::memcpy(&value, element, size);
    value += random.one_in(8) ? static_cast<std::uint32_t>(random.next()) : random.one_in(2) ? 1u : ~0u;
    std::memcpy(element, &value, size);
  }
}

void damage(Random& random, Bytes& granule) {
  if (random.one_in(16)) fill(random, granule.data(), granule.size());
  if (random.one_in(8)) granule.resize(random.below(granule.size() + 1));
  for (std::size_t flips = random.below(4); flips > 0 && !granule.empty(); --flips) {
    const std::size_t at = random.one_in(2) ? random.below(16) % granule.size() : random.below(granule.size());
    granule[at] ^= static_cast<std::uint8_t>(1u << random.below(8));
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::size_t cases = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 5000;
  Random random(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
  std::vector<const Kernels*> tables;
  for (const Kernels* const* table = all_kernels(); *table; ++table) {
    if ((*table)->supported()) tables.push_back(*table);
  }
  GuardedBuffer olds(4 * kDeltaGranule), news(4 * kDeltaGranule), wire(4 * kDeltaGranule + 64);
  const std::unique_ptr<std::uint32_t[]> room(new std::uint32_t[kDeltaRoom]);
  std::size_t refused = 0;
  for (std::size_t at = 0; at < cases; ++at) {
    const auto kind = static_cast<WeightKind>(random.below(kWeightKinds));
    const unsigned size = layout_of(kind).size;
    const std::size_t n = random.one_in(64) ? kDeltaGranule - random.below(70) : 1 + random.below(700);
    const bool end = random.one_in(2);
    Bytes old(n * size);
    fill(random, old.data(), old.size());
    if (random.one_in(2)) {  // few exponents
      for (std::size_t i = size - 1; i < old.size(); i += size) old[i] = static_cast<std::uint8_t>(0x3c - (old[i] & 3));
    }
    Bytes fresh = old;
    change(random, size, fresh);
    Bytes granule;
    const std::size_t bound = delta_granule_bound(n, size) + kDeltaSlack;
    for (const Kernels* kernels : tables) {
      std::uint8_t* const from = olds.place(old.size(), end);
      std::memcpy(from, old.data(), old.size());
      std::uint8_t* const to = news.place(fresh.size(), end);
      std::memcpy(to, fresh.data(), fresh.size());
      std::uint8_t* const coded = wire.place(bound, end);
      const std::size_t bytes = kernels->delta.encode(kind, from, to, n, room.get(), coded);
      if (bytes > bound - kDeltaSlack || !wire.intact()) fail(at, kernels->name, "encode wrote beside its granule");
      const Bytes own(coded, coded + bytes);
      if (kernels != tables.front() && own != granule) fail(at, kernels->name, "encode gives other bytes");
      granule = own;
    }
    const bool whole = random.one_in(8);
    if (!whole && !granule.empty()) damage(random, granule);
    bool expected_refusal = false;
    Bytes expected;
    for (const Kernels* kernels : tables) {
      std::uint8_t* const from = wire.place(granule.size() + kDeltaPadding, end);
      if (!granule.empty()) std::memcpy(from, granule.data(), granule.size());
      std::memset(from + granule.size(), random.one_in(2) ? 0 : 0xff, kDeltaPadding);
      std::uint8_t* const weights = olds.place(old.size(), end);
      // A granule that was checked without weights may meet any: it changes these, and touches nothing else.
      if (!kernels->delta.check(kind, from, granule.size(), n, nullptr, nullptr)) {
        std::memcpy(weights, fresh.data(), fresh.size());
        kernels->delta.decode(kind, from, granule.size(), n, room.get(), weights);
      }
      std::memcpy(weights, old.data(), old.size());
      const bool refusal = kernels->delta.check(kind, from, granule.size(), n, weights, nullptr) != nullptr;
      if (!refusal) kernels->delta.decode(kind, from, granule.size(), n, room.get(), weights);
      if (!olds.intact() || !wire.intact()) fail(at, kernels->name, "decode wrote beside the weights");
      const Bytes result(weights, weights + old.size());
      if (refusal && result != old) fail(at, kernels->name, "a refused granule changed weights");
      if (whole && result != fresh) fail(at, kernels->name, "a bit is wrong");
      if (kernels == tables.front()) {
        expected_refusal = refusal;
        expected = result;
        refused += refusal;
      } else if (refusal != expected_refusal || result != expected) {
        fail(at, kernels->name, "kernels differ on a damaged granule");
      }
    }
  }
  std::printf("%zu granules, %zu refused, %zu kernels\n", cases, refused, tables.size());
  return 0;
}
