// Binding of the core-to-core latency measurement. dtcomm/cli/tune/cpu_placement.py uses it.
#include "cpu/core_to_core_latency.h"

#include "python/bindings.h"
#include "python/without_gil.h"

namespace dtcomm::python {

namespace py = pybind11;

void bind_latency(py::module_& module) {
  module.def(
      "round_trip_ns",
      [](int cpu_a, int cpu_b, int batches, int trips) {
        if (batches < 1 || trips < 1) throw py::value_error("batches, trips: must be at least 1");
        return without_gil([&] { return round_trip_ns(cpu_a, cpu_b, batches, trips); });
      },
      py::arg("cpu_a"), py::arg("cpu_b"), py::arg("batches"), py::arg("trips"),
      "Round-trip time of a cache line between two CPUs in nanoseconds; negative if a thread may not run on one.");
}

}  // namespace dtcomm::python
