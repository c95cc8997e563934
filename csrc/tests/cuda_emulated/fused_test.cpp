// Tests of the fused collectives: random scenarios in random orders of threads, and faults that must be detected.
#include "tests/cuda_emulated/fused_scenarios.h"

namespace dtcomm::cuda_emulated {

namespace {

constexpr unsigned kMaxOrders = 4000;  // a fault must be detected within so many orders
using cuda::BarrierId;
using cuda::Collective;
using emulator::Fault;

bool passes(TestBench& bench, const Scenario& scenario, std::uint64_t order) {
  const std::string what = difference(bench, scenario, order);
  if (!what.empty()) {
    std::printf("FAILED: %s, order %llu: %s\n", what.c_str(), static_cast<unsigned long long>(order),
                describe(scenario).c_str());
  }
  return what.empty();
}

bool is_detected(TestBench& bench, const Kind& kind, const Fault& fault, const char* what) {
  for (unsigned order = 0; order < kMaxOrders; ++order) {
    Scenario scenario = small_scenario(kind, order % 2 ? 3 : 2);
    scenario.seed = 9 * order;
    if (!difference(bench, scenario, order, fault).empty()) return true;
  }
  std::printf("FAILED: not detected in %u orders that %s, %s, lacks %s\n", kMaxOrders, name_of(kind.collective),
              kind.algorithm, what);
  return false;
}

bool faults_are_detected(TestBench& bench, const Kind& kind) {
  bool all = true;
  for (const BarrierId barrier : barriers_of(kind)) {
    Fault fault;
    fault.barrier = static_cast<int>(barrier);
    all &= is_detected(bench, kind, fault, name_of(barrier));
  }
  Fault without_waits, same_half;
  without_waits.waits = false;
  same_half.alternates = false;
  all &= is_detected(bench, kind, without_waits, "its waits");
  if (std::string(kind.algorithm) == "one_shot") all &= is_detected(bench, kind, same_half, "its second half");
  return all;
}

bool absent_ranks_are_named(TestBench& bench, const Kind& kind) {
  for (const int ranks : {2, 3, 8}) {
    for (int absent = 0; absent < ranks; ++absent) {
      Scenario scenario = small_scenario(kind, ranks);
      scenario.spec.blocks = 2;
      const std::string what = difference(bench, scenario, 17, Fault(), absent);
      if (what.empty()) continue;
      std::printf("FAILED: without rank %d %s: %s\n", absent, what.c_str(), describe(scenario).c_str());
      return false;
    }
  }
  return true;
}

}  // namespace

bool fused_tests(const std::string& folder, unsigned orders) {
  TestBench bench{{}, Programs(folder)};
  std::minstd_rand random(5);
  const std::vector<Codec> tier = first_tier(read_codecs(folder));
  const std::size_t count = collective_kinds().size();
  unsigned runs = 0;
  for (const Codec& codec : tier) {
    for (const Kind& kind : collective_kinds()) {
      for (const int ranks : {2, 3, 4, 8}) {
        for (int variant = 0; variant < 2; ++variant, ++runs) {
          if (!passes(bench, random_scenario(random, codec, kind, ranks), runs)) return false;
        }
      }
    }
  }
  for (unsigned order = 0; order < orders; ++order, ++runs) {
    // Mostly few ranks: the orders of eight take as long as ten times those of two.
    const int ranks[] = {2, 2, 2, 3, 2, 3, 2, 4};
    const int n = order % 500 == 499 ? 8 : ranks[order % 8];
    if (!passes(bench, random_scenario(random, tier[order % tier.size()], collective_kinds()[order / 8 % count], n),
                order))
      return false;
  }
  for (const Kind& kind : collective_kinds()) {
    if (!faults_are_detected(bench, kind)) return false;
    if (!absent_ranks_are_named(bench, kind)) return false;
  }
  std::printf("%u fused collectives in as many orders: the engine's bytes; every missing barrier and rank was found\n",
              runs);
  return true;
}

}  // namespace dtcomm::cuda_emulated
