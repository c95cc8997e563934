// What the fused collectives are tried with, and in which orders; and that each of their barriers is needed.
#include <cstdio>
#include <vector>

#include "tests/device/cases.h"
#include "tests/device/fused.h"

namespace dtcomm::device_tests {

namespace {

constexpr unsigned kPatience = 4000;  // orders in which a fault has to show
using cuda::Collective;
using cuda::Fault;
using cuda::Point;

struct Kind {
  Collective collective;
  const char* algorithm;
};

bool is_program(const Kind& kind) {
  return trial(kind.collective, kind.algorithm, 2).call.algorithm == cuda::Algorithm::program;
}

const Kind kKinds[] = {{Collective::all_reduce, "two_shot"},     {Collective::all_reduce, "one_shot"},
                       {Collective::reduce_scatter, "one_shot"}, {Collective::all_gather, "one_shot"},
                       {Collective::all_to_all, "one_shot"},     {Collective::all_reduce, "ring"},
                       {Collective::all_reduce, "tree"},         {Collective::all_reduce, "halving"},
                       {Collective::all_reduce, "double_tree"},  {Collective::reduce_scatter, "ring"},
                       {Collective::all_gather, "ring"}};

// The codecs with fused kernels: casts, and the usual blocks of int8, int4 and e4m3.
std::vector<Codec> first_tier() {
  std::vector<Codec> found;
  for (const Codec& codec : codecs()) {
    if (cuda::fusible(codec, DType::f32)) found.push_back(codec);
  }
  return found;
}

bool is_cast(const Codec& codec) {
  return codec.family == Family::none || codec.family == Family::fp16 || codec.family == Family::bf16;
}

Trial drawn(std::minstd_rand& random, const Codec& codec, const Kind& kind, int ranks) {
  const auto one_of = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const DType dtypes[] = {DType::f32, DType::f32, DType::f16, DType::bf16};
  const auto n = static_cast<std::size_t>(ranks);
  const std::size_t granule = granule_elements(codec);
  Trial which = trial(kind.collective, kind.algorithm, ranks);
  cuda::FusedCall& call = which.call;
  const bool whole = kind.collective == Collective::all_reduce, reduces = kind.collective <= Collective::reduce_scatter;
  call.codec = codec;
  call.dtype = dtypes[one_of(4)];
  call.numel = 1 + one_of(granule * (whole ? n + 2 : ranks < 4 ? 3 : 2));
  call.blocks = static_cast<unsigned>(1 + one_of(ranks < 4 ? 3 : 2));
  call.section = static_cast<std::uint32_t>(1 + one_of(2));
  call.divisor = reduces && one_of(2) ? n : 1;
  which.residual = one_of(2);
  which.in_place = kind.collective != Collective::all_to_all && one_of(2);
  which.calls = static_cast<unsigned>(1 + one_of(2));
  which.varies = which.calls > 1 && one_of(2);
  which.seed = static_cast<unsigned>(one_of(90000));
  if (kind.collective == Collective::all_to_all && kind.algorithm == std::string("one_shot") && one_of(2)) {
    for (std::size_t pair = 0; pair < n * n; ++pair) {
      call.splits.push_back(one_of(4) ? one_of(granule * 2) : 0);
    }
    call.splits[one_of(n * n)] += 1;
  }
  if (reduces && is_cast(codec) && !which.residual) {
    call.op = static_cast<ReduceOp>(one_of(3));
    if (call.op != ReduceOp::sum) call.divisor = 1;
  }
  if (whole && call.algorithm != cuda::Algorithm::program && one_of(4) == 0) {
    which.bias = one_of(2);
    which.addend = !which.bias || one_of(2);
    call.features = 1 + one_of(300);
    call.numel = (call.numel + call.features - 1) / call.features * call.features;
    call.encodes_own = call.algorithm == cuda::Algorithm::two_shot && !which.residual && one_of(2);
    call.rounds = one_of(2);
  }
  return which;
}

bool holds(Bench& bench, const Trial& which, std::uint64_t order) {
  const std::string what = differs(bench, which, order);
  if (!what.empty()) {
    std::printf("FAILED: %s, order %llu: %s\n", what.c_str(), static_cast<unsigned long long>(order),
                describe(which).c_str());
  }
  return what.empty();
}

// Three sections for the block of each rank, so that slots and calls are used again; of a codec whose blocks several
// lanes encode and whose bytes others copy than wrote them.
Trial small(const Kind& kind, int ranks) {
  Trial which = trial(kind.collective, kind.algorithm, ranks);
  which.call.codec.family = Family::integer;
  which.call.codec.bits = 8;
  which.call.codec.block = 32;
  which.call.section = 1;
  // Whole granules: lanes that see another section than their neighbours must not come to other exchanges, too.
  const bool cut = which.call.algorithm != cuda::Algorithm::one_shot && kind.collective == Collective::all_reduce;
  if (is_program(kind)) {
    which.varies = true;
    which.calls = 2;
  }
  which.call.numel = kGranule * (cut ? 3 * static_cast<unsigned>(ranks) : 3);
  return which;
}

bool found(Bench& bench, const Kind& kind, const Fault& fault, const char* what) {
  for (unsigned order = 0; order < kPatience; ++order) {
    Trial which = small(kind, order % 2 ? 3 : 2);
    which.seed = 9 * order;
    if (!differs(bench, which, order, fault).empty()) return true;
  }
  std::printf("FAILED: nobody noticed in %u orders that %s, %s, lacks %s\n", kPatience, name_of(kind.collective),
              kind.algorithm, what);
  return false;
}

// The points at which the blocks of a kernel meet.
std::vector<Point> points(const Kind& kind) {
  // The calls of a tree wait for each other by themselves.
  if (kind.algorithm == std::string("tree")) return {Point::aimed, Point::stored, Point::arrived};
  if (is_program(kind)) return {Point::aimed, Point::entered, Point::stored, Point::arrived};
  if (kind.collective == Collective::reduce_scatter || kind.collective == Collective::all_to_all) {
    return {Point::aimed, Point::stored, Point::arrived, Point::done};
  }
  if (std::string(kind.algorithm) == "one_shot") {
    return {Point::aimed, Point::reduced, Point::pushed, Point::gathered, Point::done};
  }
  return {Point::aimed, Point::stored, Point::arrived, Point::reduced, Point::pushed, Point::gathered, Point::done};
}

bool faults_are_found(Bench& bench, const Kind& kind) {
  const char* const names[] = {"aimed", "stored", "arrived", "reduced", "pushed", "gathered", "entered", "done"};
  bool all = true;
  for (const Point point : points(kind)) {
    Fault fault;
    fault.point = static_cast<int>(point);
    all &= found(bench, kind, fault, names[fault.point]);
  }
  Fault deaf, same_half;
  deaf.waits = false;
  same_half.halves = false;
  all &= found(bench, kind, deaf, "its waits");
  if (std::string(kind.algorithm) == "one_shot") all &= found(bench, kind, same_half, "its second half");
  return all;
}

bool absent_ranks_are_named(Bench& bench, const Kind& kind) {
  for (const int ranks : {2, 3, 8}) {
    for (int absent = 0; absent < ranks; ++absent) {
      Trial which = small(kind, ranks);
      which.call.blocks = 2;
      const std::string what = differs(bench, which, 17, Fault(), absent);
      if (what.empty()) continue;
      std::printf("FAILED: without rank %d %s: %s\n", absent, what.c_str(), describe(which).c_str());
      return false;
    }
  }
  return true;
}

}  // namespace

bool fused_tests(const std::string& programs, unsigned orders) {
  Bench bench{{}, Programs(programs)};
  std::minstd_rand random(5);
  const std::vector<Codec> tier = first_tier();
  constexpr std::size_t kinds = sizeof kKinds / sizeof *kKinds;
  unsigned runs = 0;
  for (const Codec& codec : tier) {
    for (const Kind& kind : kKinds) {
      for (const int ranks : {2, 3, 4, 8}) {
        for (int variant = 0; variant < 2; ++variant, ++runs) {
          if (!holds(bench, drawn(random, codec, kind, ranks), runs)) return false;
        }
      }
    }
  }
  for (unsigned order = 0; order < orders; ++order, ++runs) {
    // Mostly few ranks: the orders of eight take as long as ten times those of two.
    const int ranks[] = {2, 2, 2, 3, 2, 3, 2, 4};
    const int n = order % 500 == 499 ? 8 : ranks[order % 8];
    if (!holds(bench, drawn(random, tier[order % tier.size()], kKinds[order / 8 % kinds], n), order)) return false;
  }
  for (const Kind& kind : kKinds) {
    // All programs have one kernel: a ring and a tree show what it needs.
    const std::string algorithm = kind.algorithm;
    const bool same = kind.collective != Collective::all_reduce || (algorithm != "ring" && algorithm != "tree");
    if (!(is_program(kind) && same) && !faults_are_found(bench, kind)) return false;
    if (!absent_ranks_are_named(bench, kind)) return false;
  }
  std::printf("%u fused collectives in as many orders: the engine's bytes; every missing barrier and rank was found\n",
              runs);
  return true;
}

}  // namespace dtcomm::device_tests
