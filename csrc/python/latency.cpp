// The distance of two CPUs for Python. dtcomm/cli/tune/cpu_placement.py says what is made of it.
#include "cpu/core_to_core_latency.h"

#include "python/bindings.h"

namespace dtcomm::python {

namespace py = pybind11;

void bind_distance(py::module_& module) {
  module.def(
      "round_trip_ns",
      [](int cpu_a, int cpu_b, int batches, int trips) {
        if (batches < 1 || trips < 1) throw py::value_error("batches, trips: must be at least 1");
        const py::gil_scoped_release release;
        return round_trip_ns(cpu_a, cpu_b, batches, trips);
      },
      py::arg("cpu_a"), py::arg("cpu_b"), py::arg("batches"), py::arg("trips"),
      "Nanoseconds of a cache line's way to the other CPU and back; negative where a thread may not run there.");
}

}  // namespace dtcomm::python
