// The functions by which each binding file adds its part to the module; module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace dtcomm::python {

void bind_kernels(pybind11::module_& module);
void bind_low_rank(pybind11::module_& module);
void bind_epilogue(pybind11::module_& module);
void bind_local_tasks(pybind11::module_& module);
void bind_fused(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_repeated_calls(pybind11::module_& module);
void bind_simulated_world(pybind11::module_& module);
void bind_latency(pybind11::module_& module);
void bind_weight_delta(pybind11::module_& module);
void bind_build_info(pybind11::module_& module);

}  // namespace dtcomm::python
