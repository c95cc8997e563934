// Fused collectives on a device.
#include <stdexcept>

#include "python/cuda.h"
#include "python/fused_plan.h"
#include "python/without_gil.h"

namespace dtcomm::python {

namespace py = pybind11;

void bind_cuda_fused(py::module_& module) {
  bind_fused_plan(module).def(
      "launch",
      [](cuda::FusedPlan& plan, const std::vector<TensorAddresses>& addresses, std::uintptr_t stream,
         std::size_t features) {
        const cuda::LaunchTensors tensors = launch_tensors(plan, addresses, features);
        // A full queue blocks.
        without_gil([&] { raise_if_not_queued(cuda::launch(plan, tensors, pointer<void>(stream))); });
      },
      py::arg("tensors"), py::arg("stream"), py::arg("features") = 0,
      "Queue a call on a stream of the current device. `tensors` are the addresses of each local rank's input, output, "
      "residual, bias and addend (0: none), `features` is the size of the bias. Raises ValueError where the plan "
      "cannot "
      "run with these tensors, RuntimeError with CUDA's reason where a kernel was not queued.");
}

}  // namespace dtcomm::python
