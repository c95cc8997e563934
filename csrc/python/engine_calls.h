// Conversion of one operation from Python to the engine's Call.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "engine/call.h"
#include "python/local_tasks.h"

namespace dtcomm::python {

// (input address or 0, output address or 0, residual address or 0)
using PointerTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t>;
using Tasks = std::vector<NativeTask>;

TensorPointers tensor_pointers(std::uintptr_t in, std::uintptr_t out, std::uintptr_t residual);
std::vector<TensorPointers> tensor_pointers(const std::vector<PointerTuple>& tuples);

// A call that the currently selected kernels run. ValueError if the number of tensors differs from that of the plan's
// segments.
Call make_call(std::shared_ptr<const Plan> plan, std::vector<TensorPointers> tensors, std::uint64_t seed);
// Adds tasks before and after the operation, and the number that has to be equal on all ranks. A task that can be
// applied piece by piece becomes the call's epilogue if the plan allows it.
void add_tasks(Call& call, const Tasks& before, const Tasks& after, std::uint64_t agreed);

// Selects the kernels of all calls from now on; ValueError if this CPU cannot run them or there are none.
void select_engine_kernels(const std::string& name);
std::string engine_kernels_name();

}  // namespace dtcomm::python
