// What Python hands over for one operation, as the engine takes it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "engine/interpreter.h"
#include "python/local_tasks.h"

namespace dtcomm::python {

// (input address, output address or 0, residual address or 0)
using PointerTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t>;
// What is done before and after the operation.
using Steps = std::vector<NativeTask>;

Pointers unpack(std::uintptr_t in, std::uintptr_t out, std::uintptr_t residual);
std::vector<Pointers> unpack_all(const std::vector<PointerTuple>& tuples);

// Runs by the kernels that are chosen now. ValueError where the numbers of segments differ.
Call make_call(std::shared_ptr<const Plan> plan, std::vector<Pointers> pointers, std::uint64_t seed);
void add_steps(Call& call, const Steps& before, const Steps& after, std::uint64_t agreed);

// The kernels of all calls from now on; ValueError where none have this name.
void choose_engine_kernels(const std::string& name);
std::string engine_kernels_name();

}  // namespace dtcomm::python
