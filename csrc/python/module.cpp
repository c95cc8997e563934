#include "python/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "dtcomm's native core: CPU kernels and the engine";
  dtcomm::python::bind_kernels(module);
  dtcomm::python::bind_low_rank(module);
  dtcomm::python::bind_epilogue(module);
  dtcomm::python::bind_local_tasks(module);
  dtcomm::python::bind_fused(module);
  dtcomm::python::bind_plan(module);
  dtcomm::python::bind_engine(module);
  dtcomm::python::bind_repeated_calls(module);
  dtcomm::python::bind_simulated_world(module);
  dtcomm::python::bind_latency(module);
  dtcomm::python::bind_weight_delta(module);
  dtcomm::python::bind_build_info(module);
}
