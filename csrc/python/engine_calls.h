// Conversion of one operation from Python to the engine's Call, and of the engine's errors to Python.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "engine/call.h"
#include "engine/tuner.h"
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

// Tells the engine where peers can reach the input of a zero-copy call.
void locate_input(Call& call);

// The number of a communicator's calls, which is the seed of those that the caller gives none.
class CallCounter {
 public:
  std::uint64_t next() { return value_.fetch_add(1, std::memory_order_relaxed) + 1; }
  std::uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

// What a tuner has chosen, by size class, as dicts.
pybind11::list reports_of(const std::vector<SizeClassReport>& reports);

// A text that may come from another rank, which need not be valid UTF-8.
pybind11::object text_of(const std::string& text);
// Sets the exception of dtcomm.errors that belongs to an error of the engine, or OSError with its errno. Rethrows
// other exceptions.
void translate_error(std::exception_ptr pointer);
// The same for functions that pybind11 does not call: sets a Python exception for every C++ exception.
void set_python_error(std::exception_ptr pointer);

// Selects the kernels of all calls from now on; ValueError if this CPU cannot run them or there are none.
void select_engine_kernels(const std::string& name);
std::string engine_kernels_name();

}  // namespace dtcomm::python
