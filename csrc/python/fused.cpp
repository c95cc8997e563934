// Fused collectives on the emulator: what tests and virtual ranks run where there is no device.
#include "python/fused.h"

#include "cuda/fused/host/emulator.h"
#include "python/bindings.h"

namespace dtcomm::python {

namespace py = pybind11;

void bind_fused(py::module_& module) {
  bind_fused_call(module).def(
      "launch",
      [](const cuda::FusedCall& stated, const std::vector<ShareNumbers>& shares, std::uint64_t order, int absent,
         std::size_t features) {
        const cuda::FusedCall call = with_tensors(stated, shares, features);
        static cuda::Emulator emulator;  // its lanes' stacks are kept; under the interpreter's lock
        const std::string why = emulator.launch(call, order, absent);
        if (!why.empty()) throw py::value_error(why);
      },
      py::arg("shares"), py::arg("order") = 0, py::arg("absent") = -1, py::arg("features") = 0,
      "Run it to its end, all ranks here, lanes taking turns in the order of a seed. `absent`: a rank that never "
      "starts. ValueError says why there is no kernel for it.");
}

}  // namespace dtcomm::python
