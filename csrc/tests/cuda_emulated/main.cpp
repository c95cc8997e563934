// Compares the CUDA kernels on the emulator with the CPU's kernels, byte for byte, so that machines without a GPU
// notice when csrc/cuda and csrc/cpu no longer make the same bytes. What only a device can show (launches, streams,
// graphs) is tested by tests/cuda.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <vector>

#include "cuda/make_params.h"
#include "tests/cuda_emulated/emulated_kernels.h"
#include "tests/cuda_emulated/fused_check.h"
#include "tests/cuda_emulated/kernel_cases.h"
#include "tests/cuda_emulated/low_rank.h"
#include "tests/cuda_emulated/rounded_sum.h"
#include "tests/cuda_emulated/test_inputs.h"

namespace {

using namespace dtcomm;
using namespace dtcomm::cuda_emulated;

// A case on both sides.
struct Pair {
  Pair(const Codec& codec, const Case& which) : emulated(codec, which), expected(codec, which), which(which) {}
  Memory emulated, expected;
  Case which;
};

// Runs a case with the CPU's kernels and prints what differs from what the emulator wrote.
bool same(const Kernels& cpu, const Codec& codec, const Pair& pair) {
  const Combine& call = pair.expected.call;
  if (pair.which.decodes) {
    cpu.decode(codec, call.payloads[0], call.numel, call.dtype, call.out, call.out_dtype, false);
  } else {
    cpu.combine(codec, call);
  }
  const char* differs = pair.emulated.differs(pair.expected);
  if (differs) std::printf("FAILED: %s of %s, %s\n", differs, describe(codec).c_str(), describe(pair.which).c_str());
  return !differs;
}

// Runs cases of dense kernels in groups of the sizes 1, 2, 3, ... that one launch serves.
bool same_in_groups(const Kernels& cpu, const Codec& codec, const std::vector<Case>& all, long& launches) {
  std::size_t most = 1;
  for (std::size_t at = 0; at < all.size();) {
    std::vector<std::unique_ptr<Pair>> pairs;
    std::vector<const Combine*> calls;
    std::vector<const std::uint8_t* const*> tables;
    for (std::size_t i = at; i < all.size() && pairs.size() < most && all[i].dtype == all[at].dtype; ++i) {
      pairs.push_back(std::make_unique<Pair>(codec, all[i]));
      calls.push_back(&pairs.back()->emulated.call);
      tables.push_back(pairs.back()->emulated.table());
    }
    pairs.resize(combine_group_emulated(codec, calls, tables));
    for (const auto& pair : pairs) {
      if (!same(cpu, codec, *pair)) return false;
    }
    at += pairs.size();
    most = most % cuda::kMaxGroup + 1;
    ++launches;
  }
  return true;
}

bool is_dense(const Codec& codec, const Pair& pair) {
  const Combine& call = pair.emulated.call;
  return !cuda::is_sparse(codec) && !cuda::single_verbatim_term(codec, call) &&
         !(codec.family == Family::none && cuda::is_native_sum_type(call.dtype));
}

// So that neighbours have the same kernel.
bool precedes(const Case& a, const Case& b) {
  const auto key = [](const Case& c) { return std::tuple(c.dtype, c.op, c.count, c.encodes, c.out || c.residual); };
  return key(a) < key(b);
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
  if (!low_rank_tests() || !rounded_sum_tests()) return EXIT_FAILURE;
  const Kernels& cpu = *find_kernels("generic");
  long calls = 0, launches = 0;
  for (const Codec& codec : read_codecs(arguments[1])) {
    std::vector<Case> dense;
    for (const Case& which : cases(codec)) {
      Pair pair(codec, which);
      ++calls;
      if (is_dense(codec, pair)) {
        dense.push_back(which);
        continue;
      }
      combine_emulated(codec, pair.emulated.call, pair.emulated.table());
      ++launches;
      if (!same(cpu, codec, pair)) return EXIT_FAILURE;
    }
    std::stable_sort(dense.begin(), dense.end(), precedes);
    if (!same_in_groups(cpu, codec, dense, launches)) return EXIT_FAILURE;
  }
  std::printf("%ld calls in %ld launches: the same bytes\n", calls, launches);
  return EXIT_SUCCESS;
}
