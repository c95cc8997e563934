// What the fused collectives are tried with, and in which orders; and that each of their barriers is needed.
#include <cstdio>
#include <vector>

#include "tests/device/cases.h"
#include "tests/device/fused.h"

namespace dtcomm::device_tests {

namespace {

constexpr unsigned kMostBlocksHere = 16;
constexpr unsigned kPatience = 4000;  // orders in which a fault has to show
using cuda::Algorithm;
using cuda::Point;

// The codecs with fused kernels: casts, and the usual blocks of int8, int4 and e4m3.
std::vector<Codec> first_tier() {
  std::vector<Codec> found;
  for (const Codec& codec : codecs()) {
    if (cuda::fusible(codec, DType::f32)) found.push_back(codec);
  }
  return found;
}

Collective drawn(std::minstd_rand& random, const Codec& codec, Algorithm algorithm, int ranks) {
  const auto one_of = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
  const DType dtypes[] = {DType::f32, DType::f32, DType::f16, DType::bf16};
  const std::size_t granule = granule_elements(codec);
  Collective which;
  which.codec = codec;
  which.sum.algorithm = algorithm;
  which.sum.ranks = ranks;
  which.sum.dtype = dtypes[one_of(4)];
  which.sum.numel = 1 + one_of(static_cast<unsigned>(granule) * (static_cast<unsigned>(ranks) + 2));
  which.sum.blocks = ranks < 4 ? 1 + one_of(3) : 1 + one_of(2);
  which.sum.section = 1 + one_of(2);
  which.sum.divisor = one_of(2) ? static_cast<std::size_t>(ranks) : 1;
  which.residual = one_of(2);
  which.in_place = one_of(2);
  which.calls = 1 + one_of(2);
  which.seed = one_of(90000);
  return which;
}

bool holds(Swarm& swarm, const Collective& which, std::uint64_t order) {
  const std::string what = differs(swarm, which, order);
  if (!what.empty()) {
    std::printf("FAILED: %s, order %llu: %s\n", what.c_str(), static_cast<unsigned long long>(order),
                describe(which).c_str());
  }
  return what.empty();
}

// Three sections for the block of each rank, so that slots and calls are used again; of a codec whose blocks several
// lanes encode and whose bytes others copy than wrote them.
Collective small(Algorithm algorithm, int ranks) {
  Collective which;
  which.codec.family = Family::integer;
  which.codec.bits = 8;
  which.codec.block = 32;
  which.sum.algorithm = algorithm;
  which.sum.ranks = ranks;
  which.sum.section = 1;
  which.sum.numel = kGranule * (algorithm == Algorithm::two_shot ? 3 * static_cast<unsigned>(ranks) : 3) - 24;
  return which;
}

bool found(Swarm& swarm, Algorithm algorithm, const Fault& fault, const char* what) {
  for (unsigned order = 0; order < kPatience; ++order) {
    Collective which = small(algorithm, order % 2 ? 3 : 2);
    which.seed = 9 * order;
    if (!differs(swarm, which, order, fault).empty()) return true;
  }
  std::printf("FAILED: nobody noticed in %u orders that %s lacks %s\n", kPatience,
              algorithm == Algorithm::two_shot ? "two_shot" : "one_shot", what);
  return false;
}

bool faults_are_found(Swarm& swarm) {
  const char* const names[] = {"aimed", "stored", "arrived", "reduced", "pushed", "gathered", "done"};
  bool all = true;
  for (int point = 0; point <= static_cast<int>(Point::done); ++point) {
    Fault fault;
    fault.point = point;
    all &= found(swarm, Algorithm::two_shot, fault, names[point]);
    const bool of_one = point != static_cast<int>(Point::stored) && point != static_cast<int>(Point::arrived);
    if (of_one) all &= found(swarm, Algorithm::one_shot, fault, names[point]);
  }
  Fault deaf, same_half;
  deaf.waits = false;
  same_half.halves = false;
  all &= found(swarm, Algorithm::two_shot, deaf, "its waits");
  all &= found(swarm, Algorithm::one_shot, deaf, "its waits");
  all &= found(swarm, Algorithm::one_shot, same_half, "its second half");
  return all;
}

bool absent_ranks_are_named(Swarm& swarm) {
  for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::one_shot}) {
    for (const int ranks : {2, 3, 8}) {
      for (int absent = 0; absent < ranks; ++absent) {
        Collective which = small(algorithm, ranks);
        which.sum.blocks = 2;
        const std::string what = differs(swarm, which, 17, Fault(), absent);
        if (what.empty()) continue;
        std::printf("FAILED: without rank %d %s: %s\n", absent, what.c_str(), describe(which).c_str());
        return false;
      }
    }
  }
  return true;
}

}  // namespace

bool fused_tests(unsigned orders) {
  Swarm swarm(kMostBlocksHere);
  std::minstd_rand random(5);
  const std::vector<Codec> tier = first_tier();
  const Algorithm algorithms[] = {Algorithm::two_shot, Algorithm::one_shot};
  unsigned runs = 0;
  for (const Codec& codec : tier) {
    for (const Algorithm algorithm : algorithms) {
      for (const int ranks : {2, 3, 4, 8}) {
        for (int variant = 0; variant < 3; ++variant, ++runs) {
          Collective which = drawn(random, codec, algorithm, ranks);
          if (codec.family != Family::integer && codec.family != Family::float8 && !which.residual) {
            which.sum.op = static_cast<ReduceOp>(random() % 3);
            if (which.sum.op != ReduceOp::sum) which.sum.divisor = 1;
          }
          if (!holds(swarm, which, runs)) return false;
        }
      }
    }
  }
  for (unsigned order = 0; order < orders; ++order, ++runs) {
    // Mostly few ranks: the orders of eight take as long as ten times those of two.
    const int ranks[] = {2, 2, 2, 3, 2, 3, 2, 4};
    const int n = order % 500 == 499 ? 8 : ranks[order % 8];
    if (!holds(swarm, drawn(random, tier[order % tier.size()], algorithms[order / 8 % 2], n), order)) return false;
  }
  if (!faults_are_found(swarm) || !absent_ranks_are_named(swarm)) return false;
  std::printf("%u fused all-reduces in as many orders: the same bytes; every missing barrier and rank was found\n",
              runs);
  return true;
}

}  // namespace dtcomm::device_tests
