// Each binding file of `_cuda` adds its part to the module; cuda.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace dtcomm::python {

void bind_cuda_fused(pybind11::module_& module);

}  // namespace dtcomm::python
