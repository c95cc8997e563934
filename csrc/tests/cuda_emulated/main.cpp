// Compares the CUDA kernels on the emulator with the CPU's kernels, byte for byte, so that machines without a GPU
// notice when csrc/cuda and csrc/cpu no longer make the same bytes. What only a device can show (launches, streams,
// graphs) is tested by tests/cuda.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/cuda_emulated/emulated_kernels.h"
#include "tests/cuda_emulated/fused_check.h"
#include "tests/cuda_emulated/kernel_cases.h"
#include "tests/cuda_emulated/low_rank.h"
#include "tests/cuda_emulated/test_inputs.h"

namespace {

using namespace dtcomm;
using namespace dtcomm::cuda_emulated;

// Runs one call on both sides and prints what differs.
bool same(const Kernels& cpu, const Codec& codec, const Case& which, long& calls) {
  Memory emulated(codec, which), expected(codec, which);
  if (!combine_emulated(codec, emulated.call, emulated.table())) return true;  // a copy
  ++calls;
  const Combine& call = expected.call;
  if (which.decodes) {
    cpu.decode(codec, call.payloads[0], call.numel, call.dtype, call.out, call.out_dtype, false);
  } else {
    cpu.combine(codec, call);
  }
  const char* differs = emulated.differs(expected);
  if (differs) std::printf("FAILED: %s of %s, %s\n", differs, describe(codec).c_str(), describe(which).c_str());
  return !differs;
}

}  // namespace

// Arguments: the folder of tests/cuda/emulator_inputs.py. After it `fused N`: only the fused collectives, in N orders;
// `kernels`: all but the fused collectives.
int main(int count, char** arguments) {
  if (count < 2) return EXIT_FAILURE;
  const bool alone = count > 2 && std::strcmp(arguments[2], "fused") == 0;
  const unsigned orders = alone && count > 3 ? static_cast<unsigned>(std::atoi(arguments[3])) : 10000;
  const bool skips_fused = count > 2 && std::strcmp(arguments[2], "kernels") == 0;
  if (!skips_fused && !fused_tests(arguments[1], orders)) return EXIT_FAILURE;
  if (alone) return EXIT_SUCCESS;
  if (!low_rank_tests()) return EXIT_FAILURE;
  const Kernels& cpu = *find_kernels("generic");
  long calls = 0;
  for (const Codec& codec : read_codecs(arguments[1])) {
    for (const Case& which : cases(codec)) {
      if (!same(cpu, codec, which, calls)) return EXIT_FAILURE;
    }
  }
  std::printf("%ld calls: the same bytes\n", calls);
  return EXIT_SUCCESS;
}
