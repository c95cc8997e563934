// Finds data races of the CUDA kernels on the CPU: accesses that PTX's memory model does not order, whatever the CPU's
// memory model does.
// Arguments: the folder of tests/cuda/emulator_inputs.py, and how many random calls of the fused collectives.
#include <cstdlib>

#include "tests/race_detector/tests.h"

int main(int count, char** arguments) {
  using namespace dtcomm::race_detector;
  if (count < 2) return EXIT_FAILURE;
  constexpr unsigned kOrders = 330, kEvery = 24;
  const unsigned orders = count > 2 ? static_cast<unsigned>(std::atoi(arguments[2])) : kOrders;
  const bool all = litmus_tests() && kernel_tests(arguments[1], orders > kOrders ? 1 : kEvery) && low_rank_tests() &&
                   rounded_sum_tests() && fused_tests(arguments[1], orders);
  return all ? EXIT_SUCCESS : EXIT_FAILURE;
}
