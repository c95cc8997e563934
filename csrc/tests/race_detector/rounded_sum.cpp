// Races of the kernels of correctly rounded sums, whose threads store to different places only.
#include "tests/cuda_emulated/rounded_sum.h"

#include <cstdio>
#include <vector>

#include "tests/race_detector/tests.h"

namespace dtcomm::race_detector {

namespace {

constexpr std::size_t kNumel = 1024, kBlocks = kNumel / kRoundedBlock;

// All steps of a sum of one rank, in two parts; with `overlap` both have the same place for their digits.
bool races(Detector& detector, bool overlap) {
  alignas(16) static float x[kNumel], out[kNumel];
  alignas(16) static std::int32_t digits[kNumel * 4];
  for (std::size_t i = 0; i < kNumel; ++i) x[i] = static_cast<float>(i) - 300.5F;
  std::vector<std::uint8_t> tops(kBlocks), lows(kBlocks);
  cuda_emulated::measure_emulated({x, kNumel, tops.data(), lows.data(), DType::f32, false}, &detector);
  const SumDigits sum = {1, tops.data(), lows.data()};
  std::vector<std::int32_t> halves(kBlocks);
  cuda_emulated::count_emulated({sum, kBlocks, halves.data()});
  std::vector<std::int64_t> ends(kBlocks);
  for (std::size_t b = 0; b < kBlocks; ++b) ends[b] = (b ? ends[b - 1] : 0) + halves[b];
  const auto middle = static_cast<std::uint64_t>(ends[kBlocks / 2 - 1]) * kHalfBlock;
  const cuda::SplitCall split = {sum, ends.data(), x, kNumel / 2, digits, DType::f32, 2, {0, overlap ? 0 : middle}};
  cuda_emulated::split_emulated(split, kNumel * 4, &detector);
  cuda_emulated::round_emulated({sum, ends.data(), digits, kNumel, 1, out, DType::f32}, &detector);
  return !detector.take().empty();
}

}  // namespace

bool rounded_sum_tests() {
  Detector detector;
  if (!races(detector, false) && races(detector, true)) return true;
  std::printf("FAILED: a rounded sum races, or parts that overlap are not found\n");
  return false;
}

}  // namespace dtcomm::race_detector
