// The functions by which each binding file of `_cuda` adds its part to the module; cuda.cpp calls them. Checks and
// exceptions that they share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/status.h"
#include "core/types.h"

namespace dtcomm::python {

void bind_cuda_fused(pybind11::module_& module);
void bind_cuda_low_rank(pybind11::module_& module);
void bind_cuda_rounded_sum(pybind11::module_& module);

inline bool floating(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

inline void check_floats(const char* name, DType dtype) {
  if (!floating(dtype)) throw pybind11::value_error(std::string(name) + ": must be fp32, fp16 or bf16");
}

inline void check_aligned(const char* name, std::uintptr_t address, std::size_t to) {
  if (address % to != 0) throw pybind11::value_error(std::string(name) + ": must be aligned to " + std::to_string(to));
}

inline void raise_if_not_queued(const Status& status) {
  if (!status.ok()) throw std::runtime_error("CUDA: " + status.message());
}

}  // namespace dtcomm::python
