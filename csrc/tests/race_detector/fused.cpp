#include <cstdio>

#include "tests/race_detector/tests.h"

namespace dtcomm::race_detector {

namespace {

using cuda::BarrierId;
using cuda::Collective;
using cuda_emulated::difference;
using cuda_emulated::Kind;
using cuda_emulated::random_scenario;
using cuda_emulated::Scenario;
using emulator::Fault;

constexpr unsigned kTries = 4;  // a fault must be detected within so many calls

struct Observed {
  Detector detector;
  TestBench bench;

  explicit Observed(const std::string& folder) : bench{{}, cuda_emulated::Programs(folder)} {
    bench.observer = &detector;
    bench.emulator.observe(&detector);
  }
};

bool has_no_races(Observed& observed, const Scenario& scenario, std::uint64_t order, const std::string& what) {
  const std::vector<Race> races = observed.detector.take();
  if (what.empty() && races.empty()) return true;
  std::printf("FAILED: %s, order %llu: %s\n", cuda_emulated::describe(scenario).c_str(),
              static_cast<unsigned long long>(order), what.c_str());
  for (std::size_t i = 0; i < races.size() && i < 12; ++i) {
    std::printf("  %s\n", observed.detector.describe(races[i]).c_str());
  }
  return false;
}

// No races, and the engine's bytes.
bool passes(Observed& observed, const Scenario& scenario, std::uint64_t order, int absent = -1) {
  return has_no_races(observed, scenario, order, difference(observed.bench, scenario, order, Fault(), absent));
}

// A rank that is absent from one launch on, while others have more calls in the queue. Which
// rank is reported is tested by cuda_emulated_test.
bool passes_without(Observed& observed, const Kind& kind, unsigned launches) {
  Scenario scenario = cuda_emulated::small_scenario(kind, 4);
  scenario.spec.blocks = 2;
  scenario.calls = 3;
  Fault fault;
  fault.absent_launches = launches;
  difference(observed.bench, scenario, launches, fault, 1);
  return has_no_races(observed, scenario, launches, "");
}

// A fault is found by its races, whatever the bytes are.
bool is_detected(Observed& observed, const Kind& kind, const Fault& fault, const char* what, int absent = -1) {
  for (unsigned number = 0; number < kTries; ++number) {
    Scenario scenario = cuda_emulated::small_scenario(kind, number % 2 ? 3 : 2);
    scenario.residual = number / 2 == 0;
    if (absent >= 0)
      scenario.spec.blocks = 2, scenario.alternates_plans = false;  // several blocks of the first call miss it
    difference(observed.bench, scenario, number, fault, absent);
    if (!observed.detector.take().empty()) return true;
  }
  std::printf("FAILED: no race is found where %s, %s, lacks %s\n", cuda_emulated::name_of(kind.collective),
              kind.algorithm, what);
  return false;
}

Fault without(bool Fault::* what) {
  Fault fault;
  fault.*what = false;
  return fault;
}

bool faults_are_detected(Observed& observed, const Kind& kind, unsigned& faults) {
  bool all = true;
  const auto try_one = [&](const Fault& fault, const char* what, int absent = -1) {
    ++faults;
    all &= is_detected(observed, kind, fault, what, absent);
  };
  for (const BarrierId barrier : cuda_emulated::barriers_of(kind)) {
    Fault fault;
    fault.barrier = static_cast<int>(barrier);
    try_one(fault, cuda_emulated::name_of(barrier));
  }
  const std::pair<bool Fault::*, const char*> left_out[] = {{&Fault::waits, "waits"},
                                                            {&Fault::releases, "releases"},
                                                            {&Fault::acquires, "acquires"},
                                                            {&Fault::syncs_warps, "warp barriers"}};
  for (const auto& [member, what] : left_out) try_one(without(member), what);
  Fault near;
  near.scope = Scope::device;
  try_one(near, "the system's scope");
  try_one(without(&Fault::strong), "strong stores of the missing rank", 0);
  if (std::string(kind.algorithm) == "one_shot") try_one(without(&Fault::alternates), "its second half");
  return all;
}

}  // namespace

bool fused_tests(const std::string& folder, unsigned orders) {
  Observed observed(folder);
  std::minstd_rand random(11);
  const std::vector<Codec> tier = cuda_emulated::first_tier(cuda_emulated::read_codecs(folder));
  const std::vector<Kind>& collective_kinds = cuda_emulated::collective_kinds();
  unsigned runs = 0, faults = 0;
  for (unsigned order = 0; order < orders; ++order, ++runs) {
    const int ranks[] = {2, 3, 2, 4, 2, 3, 8, 4};
    const Kind& kind = collective_kinds[order % collective_kinds.size()];
    const Codec& codec = tier[order / collective_kinds.size() % tier.size()];
    Scenario scenario = random_scenario(random, codec, kind, ranks[order / collective_kinds.size() % 8]);
    scenario.calls += order % 3;  // on the same memory
    scenario.alternates_plans = order % 2;
    if (!passes(observed, scenario, order)) return false;
  }
  bool all = true;
  for (const Kind& kind : collective_kinds) {
    for (int absent = 0; absent < 3; ++absent, ++runs) {
      Scenario scenario = cuda_emulated::small_scenario(kind, 3);
      scenario.spec.blocks = 2;
      all &= passes(observed, scenario, 17, absent);
    }
    for (unsigned launches = 1; launches < 5; ++launches, ++runs) {
      all &= passes_without(observed, kind, launches);
    }
    all &= faults_are_detected(observed, kind, faults);
  }
  if (!all) return false;
  std::printf("%u fused collectives: no race in %llu accesses; all of %u faults were found\n", runs,
              static_cast<unsigned long long>(observed.detector.accesses()), faults);
  return true;
}

}  // namespace dtcomm::race_detector
