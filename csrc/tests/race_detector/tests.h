// The tests of race_detector_test. Each prints why and returns false where it failed.
#pragma once

#include <string>

#include "tests/cuda_emulated/fused_scenarios.h"
#include "tests/race_detector/detector.h"

namespace dtcomm::race_detector {

using cuda_emulated::TestBench;

// The detector on small exchanges between lanes that are known to race or not.
bool litmus_tests();

// The codec kernels: one of `every` cases of csrc/tests/cuda_emulated.
bool kernel_tests(unsigned every);

// Gram-Schmidt: there is no race, and every barrier that is left out is found.
bool low_rank_tests();

// The fused collectives: there is no race in `orders` random scenarios and in calls that miss a rank, and everything
// that orders memory is found where it is left out.
bool fused_tests(const std::string& programs, unsigned orders);

}  // namespace dtcomm::race_detector
