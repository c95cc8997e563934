// The codec kernels: what the lanes of a thread block share on their way to one payload.
#include <cstdio>

#include "codec/layout.h"
#include "tests/device/cases.h"
#include "tests/device/device.h"
#include "tests/races/races.h"

namespace dtcomm::races {

namespace {

using device_tests::Case;
using device_tests::Memory;

// Memory of the caller's, as one call sees it. What is read by one lane and written by another may be the same.
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

}  // namespace

bool kernel_tests(unsigned every) {
  Detector detector;
  unsigned calls = 0, number = 0;
  for (const Codec& codec : device_tests::codecs()) {
    for (const Case& which : device_tests::cases(codec)) {
      if (number++ % every) continue;
      Memory memory(codec, which);
      share(detector, codec, which, memory.call);
      calls += device_tests::combine_on_fibers(codec, memory.call, memory.table(), &detector);
      detector.end();  // also where there were no lanes
      const std::vector<Race> races = detector.take();
      if (races.empty()) continue;
      std::printf("FAILED: %s, %s\n  %s\n", device_tests::describe(codec).c_str(),
                  device_tests::describe(which).c_str(), detector.describe(races[0]).c_str());
      return false;
    }
  }
  std::printf("%u calls of codec kernels: no race in %llu accesses\n", calls,
              static_cast<unsigned long long>(detector.accesses()));
  return true;
}

}  // namespace dtcomm::races
