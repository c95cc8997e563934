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

namespace {

using namespace dtcomm;
using namespace dtcomm::cuda_emulated;

// One call on both; says what differs.
bool same(const Kernels& cpu, const Codec& codec, const Case& which, long& calls) {
  Memory ours(codec, which), theirs(codec, which);
  if (!combine_emulated(codec, ours.call, ours.table())) return true;  // a copy
  ++calls;
  const Combine& call = theirs.call;
  if (which.decodes) {
    cpu.decode(codec, call.payloads[0], call.numel, call.dtype, call.out, call.out_dtype, false);
  } else {
    cpu.combine(codec, call);
  }
  const char* differs = ours.differs(theirs);
  if (differs) std::printf("FAILED: %s of %s, %s\n", differs, describe(codec).c_str(), describe(which).c_str());
  return !differs;
}

}  // namespace

// Arguments: the file of tests/cuda/program_files.py. After it `fused N`: only the fused collectives, in N orders.
int main(int count, char** arguments) {
  if (count < 2) return EXIT_FAILURE;
  const bool alone = count > 2 && std::strcmp(arguments[2], "fused") == 0;
  const unsigned orders = alone && count > 3 ? static_cast<unsigned>(std::atoi(arguments[3])) : 10000;
  if (!fused_tests(arguments[1], orders)) return EXIT_FAILURE;
  if (alone) return EXIT_SUCCESS;
  if (!low_rank_tests()) return EXIT_FAILURE;
  const Kernels& cpu = *find_kernels("generic");
  long calls = 0;
  for (const Codec& codec : codecs()) {
    for (const Case& which : cases(codec)) {
      if (!same(cpu, codec, which, calls)) return EXIT_FAILURE;
    }
  }
  std::printf("%ld calls: the same bytes\n", calls);
  return EXIT_SUCCESS;
}
