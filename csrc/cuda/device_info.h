// The CUDA devices of this machine. No CUDA type appears here, so that the bindings need no toolkit header.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace dtcomm::cuda {

struct Device {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  std::size_t memory = 0;    // bytes
  int multiprocessors = 0;
};

struct Platform {
  int driver = 0;     // CUDA version that the driver supports, as 1000 * major + 10 * minor; 0: no driver
  int runtime = 0;    // the same, of the runtime this was linked with
  std::string error;  // why `devices` is empty, in CUDA's words
  std::vector<Device> devices;
};

// Never throws: a machine without driver or device is an answer, not an error.
Platform platform();

}  // namespace dtcomm::cuda
