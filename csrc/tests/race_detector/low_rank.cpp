// Races of the kernels of low-rank compression, whose lanes share products, sums and largest elements.
#include <cstdio>
#include <vector>

#include "codec/float_bits.h"
#include "tests/cuda_emulated/low_rank.h"
#include "tests/race_detector/tests.h"

namespace dtcomm::race_detector {

namespace {

// Two or three vectors, one of which is zero and is replaced by a random one. Returns the barriers of the block.
int orthonormalize(Detector& detector, std::size_t count, std::size_t n, int left_out) {
  std::vector<float> vectors(count * n);
  for (std::size_t i = 0; i < vectors.size(); ++i) vectors[i] = i < n ? 0 : static_cast<float>(i % 7) - 2;
  const cuda::Vectors call = {vectors.data(), count, n, 5};
  return cuda_emulated::orthonormalize_emulated(&call, 1, &detector, left_out);
}

// Factors of which one is not finite, so that both are overwritten after they were read.
bool check_finite_races(Detector& detector, int left_out) {
  std::vector<float> left(700, 1), right(900, float_of(kNaN32));
  std::uint8_t finite = 0;
  const cuda::Factors call = {left.data(), right.data(), left.size(), right.size(), &finite};
  cuda_emulated::check_finite_emulated(&call, 1, &detector, left_out);
  return !detector.take().empty();
}

}  // namespace

bool low_rank_tests() {
  Detector detector;
  if (check_finite_races(detector, -1) || !check_finite_races(detector, 0)) {
    std::printf("FAILED: check_finite races, or its race without a barrier is not found\n");
    return false;
  }
  constexpr std::size_t kShort = 40, kLong = 4000;  // a piece of products, and two
  for (const std::size_t n : {kShort, kLong}) {
    orthonormalize(detector, n == kShort ? 3 : 2, n, -1);
    const std::vector<Race> races = detector.take();
    if (races.empty()) continue;
    std::printf("FAILED: orthonormalize of %zu\n  %s\n", n, detector.describe(races[0]).c_str());
    return false;
  }
  int barriers = 0, detected = 0, left_out = 0;
  do {
    barriers = orthonormalize(detector, 2, kLong, left_out);
    detected += !detector.take().empty();
  } while (++left_out < barriers);
  std::printf("%d of %d barriers of Gram-Schmidt, left out one by one, are a race\n", detected, barriers);
  if (barriers < 10 || detected != barriers) {
    std::printf("FAILED: not all barriers are needed\n");
    return false;
  }
  return true;
}

}  // namespace dtcomm::race_detector
