// Fuzzes weight deltas: payloads with damage anywhere, and granules alone with hostile ones. Those are encodings with
// flipped bits, cut, and random bytes, without the checksums that would refuse them first. All kernels must refuse the
// same ones, decode the others to the same weights, and touch no byte outside their buffers. Undamaged granules must
// give the new weights.
//
//   fuzz_weight_delta_test [CASES [SEED]]    5,000 cases without arguments
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/kernels.h"
#include "engine/weight_delta.h"
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

void damage(Random& random, Bytes& granule) {
  if (random.one_in(16)) fill(random, granule.data(), granule.size());
  if (random.one_in(8)) granule.resize(random.below(granule.size() + 1));
  for (std::size_t flips = random.below(4); flips > 0 && !granule.empty(); --flips) {
    const std::size_t at = random.one_in(2) ? random.below(16) % granule.size() : random.below(granule.size());
    granule[at] ^= static_cast<std::uint8_t>(1u << random.below(8));
  }
}

// Whole payloads: all kernels refuse the same damaged ones, and read nothing behind them.
bool fuzz_payload(Random& random, std::size_t at, const std::vector<const Kernels*>& tables, GuardedBuffer& memory) {
  const auto kind = static_cast<WeightKind>(random.below(kWeightKinds));
  const unsigned size = layout_of(kind).size;
  const std::size_t n = random.one_in(64) ? kDeltaGranule + random.below(300) : random.below(300);
  const auto [old, fresh] = versions_of_weights(random, n, size);
  DeltaWriter writer(kind, n);
  writer.add(*tables.front(), 0, n, old.data(), fresh.data(), 1);
  Bytes payload(writer.bytes());
  writer.write(payload.data());
  const bool whole = random.one_in(8);
  if (!whole) damage(random, payload);
  std::uint8_t* const from = memory.place(payload.size(), true);
  if (!payload.empty()) std::memcpy(from, payload.data(), payload.size());
  const DeltaReader reader(from, payload.size());
  bool refused = !reader.error().empty() || reader.kind() != kind || reader.numel() != n;
  if (whole && refused) fail(at, "payload", "an undamaged payload is refused");
  if (refused) return true;
  refused = !reader.decode(*tables.front(), 0, n, old.data(), nullptr, 1, false).message().empty();
  for (const Kernels* kernels : tables) {
    Bytes result = old, other(old.size());
    if (refused == reader.decode(*kernels, 0, n, old.data(), other.data(), 1, false).message().empty() ||
        refused == reader.decode(*kernels, 0, n, result.data(), result.data(), 1, false).message().empty()) {
      fail(at, kernels->name, "kernels differ on a damaged payload");
    }
    if (refused && result != old) fail(at, kernels->name, "a refused payload changed weights");
    if (!refused && (result != fresh || other != fresh)) fail(at, kernels->name, "a payload gives other weights");
  }
  if (whole && refused) fail(at, "payload", "an undamaged granule is refused");
  return refused;
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
    const auto [old, fresh] = versions_of_weights(random, n, size);
    Bytes granule;
    const std::size_t bound = delta_granule_bound(n, size) + kDeltaSlack;
    for (const Kernels* kernels : tables) {
      std::uint8_t* const from = olds.place(old.size(), end);
      std::memcpy(from, old.data(), old.size());
      std::uint8_t* const to = news.place(fresh.size(), end);
      std::memcpy(to, fresh.data(), fresh.size());
      std::uint8_t* const coded = wire.place(bound, end);
      std::size_t changed = 0, differing = 0;
      const std::size_t bytes = kernels->delta.encode(kind, from, to, n, room.get(), coded, &changed);
      for (std::size_t i = 0; i < n; ++i) differing += std::memcmp(from + i * size, to + i * size, size) != 0;
      if (changed != differing) fail(at, kernels->name, "encode counts other changes");
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
      // A granule may meet any weights: it changes these, and touches nothing else.
      std::memcpy(weights, fresh.data(), fresh.size());
      kernels->delta.decode(kind, from, granule.size(), n, room.get(), weights);
      std::memcpy(weights, old.data(), old.size());
      const bool refusal = kernels->delta.check(kind, from, granule.size(), n, weights) != nullptr;
      const Bytes kept(weights, weights + old.size());
      if (kept != old) fail(at, kernels->name, "check changed weights");
      if (refusal != (kernels->delta.decode(kind, from, granule.size(), n, room.get(), weights) != nullptr)) {
        fail(at, kernels->name, "check and decode differ");
      }
      if (!olds.intact() || !wire.intact()) fail(at, kernels->name, "decode wrote beside the weights");
      const Bytes result(weights, weights + (refusal ? 0 : old.size()));
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
  const std::size_t payloads = cases / 16;  // each allocates much memory
  std::size_t payloads_refused = 0;
  for (std::size_t at = 0; at < payloads; ++at) payloads_refused += fuzz_payload(random, at, tables, wire);
  std::printf("%zu granules, %zu refused; %zu payloads, %zu refused; %zu kernels\n", cases, refused, payloads,
              payloads_refused, tables.size());
  return 0;
}
