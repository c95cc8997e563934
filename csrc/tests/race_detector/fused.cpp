#include <cstdio>

#include "tests/race_detector/tests.h"

namespace dtcomm::race_detector {

namespace {

using cuda::Collective;
using cuda::Point;
using cuda_emulated::differs;
using cuda_emulated::drawn;
using cuda_emulated::Kind;
using cuda_emulated::Trial;
using emulator::Fault;

constexpr unsigned kTries = 4;  // calls by which a fault has to show

struct Watched {
  Detector detector;
  Bench bench;

  explicit Watched(const std::string& programs) : bench{{}, cuda_emulated::Programs(programs)} {
    bench.observer = &detector;
    bench.emulator.observe(&detector);
  }
};

bool none(Watched& watched, const Trial& which, std::uint64_t order, const std::string& what) {
  const std::vector<Race> races = watched.detector.take();
  if (what.empty() && races.empty()) return true;
  std::printf("FAILED: %s, order %llu: %s\n", cuda_emulated::describe(which).c_str(),
              static_cast<unsigned long long>(order), what.c_str());
  for (std::size_t i = 0; i < races.size() && i < 12; ++i) {
    std::printf("  %s\n", watched.detector.describe(races[i]).c_str());
  }
  return false;
}

// No races, and the engine's bytes.
bool holds(Watched& watched, const Trial& which, std::uint64_t order, int absent = -1) {
  return none(watched, which, order, differs(watched.bench, which, order, Fault(), absent));
}

// A rank that is absent from one launch on: others are in the midst of a program, or have more calls in the queue. Who
// names whom is device_test's matter.
bool holds_without(Watched& watched, const Kind& kind, unsigned comes) {
  Trial which = cuda_emulated::small(kind, 4);
  which.call.blocks = 2;
  which.calls = 3;
  Fault fault;
  fault.comes = comes;
  differs(watched.bench, which, comes, fault, 1);
  return none(watched, which, comes, "");
}

// A fault is found by its races, whatever the bytes are.
bool found(Watched& watched, const Kind& kind, const Fault& fault, const char* what, int absent = -1) {
  for (unsigned number = 0; number < kTries; ++number) {
    Trial which = cuda_emulated::small(kind, number % 2 ? 3 : 2);
    which.residual = number / 2 == 0;
    if (absent >= 0) which.call.blocks = 2, which.varies = false;  // several blocks of the first call miss it
    differs(watched.bench, which, number, fault, absent);
    if (!watched.detector.take().empty()) return true;
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

bool faults_are_found(Watched& watched, const Kind& kind, unsigned& faults) {
  bool all = true;
  const auto try_one = [&](const Fault& fault, const char* what, int absent = -1) {
    ++faults;
    all &= found(watched, kind, fault, what, absent);
  };
  for (const Point point : cuda_emulated::points(kind)) {
    Fault fault;
    fault.point = static_cast<int>(point);
    try_one(fault, cuda_emulated::name_of(point));
  }
  const std::pair<bool Fault::*, const char*> left_out[] = {{&Fault::waits, "waits"},
                                                            {&Fault::releases, "releases"},
                                                            {&Fault::acquires, "acquires"},
                                                            {&Fault::together, "warps that come together"}};
  for (const auto& [member, what] : left_out) try_one(without(member), what);
  Fault near;
  near.scope = Scope::device;
  try_one(near, "the system's scope");
  try_one(without(&Fault::strong), "strong notes of who is missing", 0);
  if (std::string(kind.algorithm) == "one_shot") try_one(without(&Fault::halves), "its second half");
  if (cuda_emulated::is_program(kind)) try_one(without(&Fault::streams), "an order of its launches");
  return all;
}

}  // namespace

bool fused_tests(const std::string& programs, unsigned orders) {
  Watched watched(programs);
  std::minstd_rand random(11);
  const std::vector<Codec> tier = cuda_emulated::first_tier();
  const std::vector<Kind>& kinds = cuda_emulated::kinds();
  unsigned runs = 0, faults = 0;
  for (unsigned order = 0; order < orders; ++order, ++runs) {
    const int ranks[] = {2, 3, 2, 4, 2, 3, 8, 4};
    const Kind& kind = kinds[order % kinds.size()];
    const Codec& codec = tier[order / kinds.size() % tier.size()];
    Trial which = drawn(random, codec, kind, ranks[order / kinds.size() % 8]);
    which.calls += order % 3;  // on the same memory
    which.varies = order % 2;
    if (!holds(watched, which, order)) return false;
  }
  bool all = true;
  for (const Kind& kind : kinds) {
    for (int absent = 0; absent < 3; ++absent, ++runs) {
      Trial which = cuda_emulated::small(kind, 3);
      which.call.blocks = 2;
      all &= holds(watched, which, 17, absent);
    }
    for (unsigned comes = 1; comes < 5; ++comes, ++runs) {
      all &= holds_without(watched, kind, comes);
    }
    if (cuda_emulated::shows_its_kernel(kind)) all &= faults_are_found(watched, kind, faults);
  }
  if (!all) return false;
  std::printf("%u fused collectives: no race in %llu accesses; all of %u faults were found\n", runs,
              static_cast<unsigned long long>(watched.detector.accesses()), faults);
  return true;
}

}  // namespace dtcomm::race_detector
