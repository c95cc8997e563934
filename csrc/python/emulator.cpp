// The `_emulator` module: fused CUDA collectives on this CPU. Optional; tests and `dtcomm perf --device emulator` use
// it.
#include "emulator/emulator.h"

#include "python/fused_plan.h"

namespace dtcomm::python {

namespace py = pybind11;

PYBIND11_MODULE(_emulator, module) {
  module.doc() = "The CUDA kernels of fused collectives, run on the CPU";
  bind_fused_plan(module).def(
      "launch",
      [](cuda::FusedPlan& plan, const std::vector<TensorAddresses>& tensors, std::uint64_t seed, int absent,
         std::size_t features) {
        static emulator::Emulator emulator;  // keeps the stacks of its fibers; used under the interpreter's lock
        raise_if_invalid(emulator.launch({&plan, launch_tensors(plan, tensors, features)}, seed, absent));
      },
      py::arg("tensors"), py::arg("seed") = 0, py::arg("absent") = -1, py::arg("features") = 0,
      "Run a call to its end; all ranks must be local. `tensors` are the addresses of each rank's input, output, "
      "residual, bias and addend (0: none), `seed` decides the order of the threads, rank `absent` never starts, and "
      "`features` is the size of the bias. Raises ValueError where the plan cannot run with these tensors.");
}

}  // namespace dtcomm::python
