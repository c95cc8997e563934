// Races of the codec kernels, whose lanes share memory of their thread block.
#include <cstdio>

#include "codec/layout.h"
#include "tests/cuda_emulated/emulated_kernels.h"
#include "tests/cuda_emulated/kernel_cases.h"
#include "tests/cuda_emulated/test_inputs.h"
#include "tests/race_detector/tests.h"

namespace dtcomm::race_detector {

namespace {

using cuda_emulated::Case;
using cuda_emulated::Memory;

// Registers the caller's memory of one call. Inputs and outputs may be the same memory.
void share(Detector& detector, const Codec& codec, const Case& which, Combine& call) {
  const auto tensor = [&](const void* at, DType dtype, const char* what) {
    if (at) detector.shared(at, which.numel * size_of(dtype), what, 0);
  };
  const std::size_t bytes = wire_bytes(codec, which.numel, which.dtype);
  for (int t = 0; t < call.count; ++t) detector.constant(call.payloads[t], bytes);
  detector.constant(call.payloads, static_cast<std::size_t>(call.count) * sizeof *call.payloads);
  tensor(call.out, call.out_dtype, "output");
  tensor(call.local, call.local_dtype, "local tensor");
  tensor(call.residual_in, DType::f32, "residual");
  if (call.payload_out) detector.shared(call.payload_out, bytes, "payload", 0);
}

// The codecs whose lanes share most: the granule of a sum, its positions, and blocks that span many warps.
std::vector<Codec> sharing() {
  Codec topk, randk, rotated;
  topk.family = Family::topk;
  topk.element = Element::integer;
  topk.bits = 8;
  topk.block = 32;
  topk.kept = 341;
  Codec bitmap = topk;
  bitmap.kept = 1500;
  randk = topk;
  randk.family = Family::randk;
  rotated.family = Family::integer;
  rotated.bits = 4;
  rotated.block = 4096;
  rotated.rotate = 1;
  return {topk, bitmap, randk, rotated};
}

// A payload, a residual and a sum that is encoded again.
Case case_with_everything() {
  Case which;
  which.numel = 4096;
  which.count = 2;
  which.position = 1;
  which.residual = which.out = true;
  return which;
}

// Leaving out any one barrier makes a race, for most barriers. The exceptions are barriers before anything is shared,
// after everything, and those that another barrier follows before it matters.
bool barriers_are_needed(Detector& detector) {
  const Case which = case_with_everything();
  int all = 0, needed = 0;
  for (const Codec& codec : sharing()) {
    int barriers = 0, detected = 0, left_out = 0;
    do {
      Memory memory(codec, which);
      share(detector, codec, which, memory.call);
      cuda_emulated::combine_emulated(codec, memory.call, memory.table(), &detector, left_out);
      barriers = cuda_emulated::emulated_barriers();
      detected += !detector.take().empty();
    } while (++left_out < barriers);
    all += barriers;
    needed += detected;
    if (barriers > 1 && detected * 2 > barriers) continue;
    std::printf("FAILED: only %d of %d barriers are found to be needed, %s\n", detected, barriers,
                cuda_emulated::describe(codec).c_str());
    return false;
  }
  std::printf("%d of %d barriers of codec kernels, left out one by one, are a race\n", needed, all);
  return true;
}

}  // namespace

bool kernel_tests(const std::string& folder, unsigned every) {
  Detector detector;
  unsigned calls = 0, number = 0;
  for (const Codec& codec : cuda_emulated::read_codecs(folder)) {
    for (const Case& which : cuda_emulated::cases(codec)) {
      if (number++ % every) continue;
      Memory memory(codec, which);
      share(detector, codec, which, memory.call);
      cuda_emulated::combine_emulated(codec, memory.call, memory.table(), &detector);
      ++calls;
      detector.end();  // also where there were no lanes
      const std::vector<Race> races = detector.take();
      if (races.empty()) continue;
      std::printf("FAILED: %s, %s\n  %s\n", cuda_emulated::describe(codec).c_str(),
                  cuda_emulated::describe(which).c_str(), detector.describe(races[0]).c_str());
      return false;
    }
  }
  if (!barriers_are_needed(detector)) return false;
  std::printf("%u calls of codec kernels: no race in %llu accesses\n", calls,
              static_cast<unsigned long long>(detector.accesses()));
  return true;
}

}  // namespace dtcomm::race_detector
