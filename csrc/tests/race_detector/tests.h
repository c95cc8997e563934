// The tests of races_test. Each returns false, and has said why, where it failed.
#pragma once

#include <string>

#include "tests/cuda_emulated/fused_scenarios.h"
#include "tests/race_detector/detector.h"

namespace dtcomm::race_detector {

using cuda_emulated::TestBench;

// The detector on small exchanges between lanes, each known to be ordered or not.
bool litmus_tests();

// The codec kernels: one of `every` cases of csrc/tests/device.
bool kernel_tests(unsigned every);

// Gram-Schmidt: no race, and each barrier, left out, is found.
bool lowrank_tests();

// The fused collectives: no race in any call, in `orders` random ones and in those that miss a rank; and each thing
// that orders memory, left out, is found.
bool fused_tests(const std::string& programs, unsigned orders);

}  // namespace dtcomm::race_detector
