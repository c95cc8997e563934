#include "python/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "dtcomm's native core";
  dtcomm::python::bind_kernels(module);
  dtcomm::python::bind_lowrank(module);
  dtcomm::python::bind_epilogue(module);
  dtcomm::python::bind_steps(module);
  dtcomm::python::bind_fused(module);
  dtcomm::python::bind_engine(module);
  dtcomm::python::bind_local(module);
  dtcomm::python::bind_distance(module);
  dtcomm::python::bind_build_info(module);
}
