// The tests of race_detector_test. Each prints the first failure and returns false if there is one.
#pragma once

#include <string>

#include "tests/cuda_emulated/fused_scenarios.h"
#include "tests/race_detector/detector.h"

namespace dtcomm::race_detector {

using cuda_emulated::TestBench;

// The detector itself: litmus tests between lanes whose result is known.
bool litmus_tests();

// The codec kernels have no race: one of `every` cases of csrc/tests/cuda_emulated, with the codecs of `folder`.
bool kernel_tests(const std::string& folder, unsigned every);

// Gram-Schmidt has no race, and has one if any barrier is left out.
bool low_rank_tests();

// The steps of a correctly rounded sum have no race, and have one if two parts have the same place.
bool rounded_sum_tests();

// The fused collectives have no race in `orders` random scenarios and in calls that miss a rank, and have one if
// anything that orders memory is left out.
bool fused_tests(const std::string& folder, unsigned orders);

}  // namespace dtcomm::race_detector
