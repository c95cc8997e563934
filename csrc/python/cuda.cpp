// The `_cuda` module. Pointers and streams come as integers (`tensor.data_ptr()`, `stream.cuda_stream`).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/device.h"

namespace py = pybind11;

namespace {

py::dict describe() {
  const dtcomm::cuda::Platform platform = dtcomm::cuda::platform();
  py::list devices;
  for (const dtcomm::cuda::Device& device : platform.devices) {
    py::dict entry;
    entry["index"] = device.index;
    entry["name"] = device.name;
    entry["capability"] = py::make_tuple(device.major, device.minor);
    entry["memory"] = device.memory;
    entry["multiprocessors"] = device.multiprocessors;
    devices.append(entry);
  }
  py::dict result;
  result["driver"] = platform.driver;
  result["runtime"] = platform.runtime;
  result["error"] = platform.error;
  result["devices"] = devices;
  return result;
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "dtcomm's CUDA kernels";
  module.def("platform", &describe,
             "Driver and runtime versions (1000 * major + 10 * minor), devices, and why there are none. Never raises.");
}
