// Scenarios for the tests of fused collectives.
#pragma once

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "tests/cuda_emulated/fused_check.h"

namespace dtcomm::cuda_emulated {

struct Kind {
  cuda::Collective collective;
  const char* algorithm;
};

// Every collective with its algorithms.
const std::vector<Kind>& collective_kinds();

// Those of `codecs` that have fused kernels: casts, and the usual blocks of int8, int4 and e4m3.
std::vector<Codec> first_tier(const std::vector<Codec>& codecs);

// A random scenario of a kind.
Scenario random_scenario(std::minstd_rand& random, const Codec& codec, const Kind& kind, int ranks);

// Three sections for the block of each rank, so that slots and parameters are reused. Several lanes encode a block of
// its codec, and other lanes copy the bytes than wrote them.
Scenario small_scenario(const Kind& kind, int ranks);

// The barriers of a kind's kernel.
std::vector<cuda::BarrierId> barriers_of(const Kind& kind);
const char* name_of(cuda::BarrierId barrier);

}  // namespace dtcomm::cuda_emulated
