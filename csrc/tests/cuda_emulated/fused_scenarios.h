// What the fused collectives are tried with.
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

// Every collective, and the algorithms whose programs differ.
const std::vector<Kind>& collective_kinds();
bool is_program(const Kind& kind);
// All programs have one kernel: a ring and a tree show what it needs.
bool shows_its_kernel(const Kind& kind);

// The codecs with fused kernels: casts, and the usual blocks of int8, int4 and e4m3.
std::vector<Codec> first_tier();

// Any of a kind's calls.
Scenario random_scenario(std::minstd_rand& random, const Codec& codec, const Kind& kind, int ranks);

// Three sections for the block of each rank, so that slots and calls are used again; of a codec whose blocks several
// lanes encode and whose bytes others copy than wrote them.
Scenario small_scenario(const Kind& kind, int ranks);

// The points at which the blocks of a kernel meet.
std::vector<cuda::BarrierId> barriers_of(const Kind& kind);
const char* name_of(cuda::BarrierId barrier);

}  // namespace dtcomm::cuda_emulated
