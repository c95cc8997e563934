// What the fused collectives are tried with, and in which orders; and that each of their barriers is needed.
#include "tests/cuda_emulated/fused_scenarios.h"

namespace dtcomm::cuda_emulated {

namespace {

constexpr unsigned kMaxOrders = 4000;  // orders in which a fault has to show
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

bool found(TestBench& bench, const Kind& kind, const Fault& fault, const char* what) {
  for (unsigned order = 0; order < kMaxOrders; ++order) {
    Scenario scenario = small_scenario(kind, order % 2 ? 3 : 2);
    scenario.seed = 9 * order;
    if (!difference(bench, scenario, order, fault).empty()) return true;
  }
  std::printf("FAILED: not detected in %u orders that %s, %s, lacks %s\n", kMaxOrders, name_of(kind.collective),
              kind.algorithm, what);
  return false;
}

bool faults_are_found(TestBench& bench, const Kind& kind) {
  bool all = true;
  for (const BarrierId barrier : barriers_of(kind)) {
    Fault fault;
    fault.barrier = static_cast<int>(barrier);
    all &= found(bench, kind, fault, name_of(barrier));
  }
  Fault deaf, same_half;
  deaf.waits = false;
  same_half.alternates = false;
  all &= found(bench, kind, deaf, "its waits");
  if (std::string(kind.algorithm) == "one_shot") all &= found(bench, kind, same_half, "its second half");
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

bool fused_tests(const std::string& programs, unsigned orders) {
  TestBench bench{{}, Programs(programs)};
  std::minstd_rand random(5);
  const std::vector<Codec> tier = first_tier();
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
    if (shows_its_kernel(kind) && !faults_are_found(bench, kind)) return false;
    if (!absent_ranks_are_named(bench, kind)) return false;
  }
  std::printf("%u fused collectives in as many orders: the engine's bytes; every missing barrier and rank was found\n",
              runs);
  return true;
}

}  // namespace dtcomm::cuda_emulated
