// Fused collectives on a device.
#include <stdexcept>

#include "python/cuda.h"
#include "python/fused_plan.h"

namespace dtcomm::python {

namespace py = pybind11;

void bind_cuda_fused(py::module_& module) {
  bind_fused_call(module).def(
      "launch",
      [](const cuda::FusedCall& stated, const std::vector<ShareNumbers>& shares, std::uintptr_t stream,
         std::size_t features) {
        const cuda::FusedCall call = with_tensors(stated, shares, features);
        const std::string why = cuda::why_not(call);
        if (!why.empty()) throw py::value_error(why);
        const py::gil_scoped_release release;  // a full queue blocks
        const std::string error = cuda::launch(call, pointer<void>(stream));
        if (!error.empty()) throw std::runtime_error("CUDA: " + error);
      },
      py::arg("shares"), py::arg("stream"), py::arg("features") = 0,
      "Queue it on a stream of the current device. ValueError says why there is no kernel for it, RuntimeError what "
      "CUDA said.");
}

}  // namespace dtcomm::python
