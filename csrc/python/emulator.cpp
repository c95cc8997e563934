// The `_emulator` module: fused CUDA collectives on this CPU. Optional; tests and `dtcomm perf --device emulator` use
// it.
#include "emulator/emulator.h"

#include "python/fused_plan.h"

namespace dtcomm::python {

namespace py = pybind11;

PYBIND11_MODULE(_emulator, module) {
  module.doc() = "The CUDA kernels of fused collectives, run on the CPU";
  bind_fused_call(module).def(
      "launch",
      [](const cuda::FusedCall& stated, const std::vector<ShareNumbers>& shares, std::uint64_t order, int absent,
         std::size_t features) {
        const cuda::FusedCall call = with_tensors(stated, shares, features);
        static emulator::Emulator emulator;  // keeps the stacks of its fibers; used under the interpreter's lock
        const std::string why = emulator.launch(call, order, absent);
        if (!why.empty()) throw py::value_error(why);
      },
      py::arg("shares"), py::arg("order") = 0, py::arg("absent") = -1, py::arg("features") = 0,
      "Run the call to its end, with all ranks here, in an order that a seed decides. `absent`: a rank that never "
      "starts. Raises ValueError where there is no kernel for it.");
}

}  // namespace dtcomm::python
