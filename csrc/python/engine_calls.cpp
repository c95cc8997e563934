#include "python/engine_calls.h"

#include <atomic>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "cpu/kernels.h"
#include "engine/process_page.h"
#include "python/arguments.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace dtcomm::python {
namespace {

std::atomic<const Kernels*> engine_kernels{&best_kernels()};  // null: the reference, which the engine cannot run

const Kernels* selected_kernels() {
  const Kernels* kernels = engine_kernels.load(std::memory_order_relaxed);
  if (!kernels) {
    throw py::value_error(
        "kernels: the native engine cannot run the reference: force a native kernel, or DTCOMM_RUNTIME=process_group");
  }
  return kernels;
}

void raise(const char* name, const char* message) {
  const py::object type = py::module_::import("dtcomm.errors").attr(name);
  PyErr_SetObject(type.ptr(), text_of(message).ptr());
}

}  // namespace

TensorPointers tensor_pointers(std::uintptr_t in, std::uintptr_t out, std::uintptr_t residual) {
  return {pointer<std::uint8_t>(in), pointer<std::uint8_t>(out), pointer<float>(residual)};
}

std::vector<TensorPointers> tensor_pointers(const std::vector<PointerTuple>& tuples) {
  std::vector<TensorPointers> tensors;
  tensors.reserve(tuples.size());
  for (const auto& [in, out, residual] : tuples) tensors.push_back(tensor_pointers(in, out, residual));
  return tensors;
}

void add_tasks(Call& call, const Tasks& before, const Tasks& after, std::uint64_t agreed) {
  for (const NativeTask& task : before) call.before.push_back(task.run);
  const Plan& plan = *call.plan;
  // Only if every element is written once does the engine know when it is final.
  const bool elements_become_final =
      plan.geometry() == Geometry::whole && plan.segments().size() == 1 && plan.program().writes_chunks_once();
  for (const NativeTask& task : after) {
    // Tasks run in order, so only the first one may run before the operation has ended.
    if (task.epilogue.apply && elements_become_final && !call.epilogue.apply && call.after.empty()) {
      call.epilogue = task.epilogue;
    } else {
      call.after.push_back(task.run);
    }
  }
  call.agreed = agreed;
}

Call make_call(std::shared_ptr<const Plan> plan, std::vector<TensorPointers> tensors, std::uint64_t seed) {
  if (tensors.size() != plan->segments().size()) throw py::value_error("pointers: one triple per segment of the plan");
  Call call;
  call.plan = std::move(plan);
  call.tensors = std::move(tensors);
  call.seed = seed;
  call.kernels = selected_kernels();
  return call;
}

void locate_input(Call& call) {
  if (!call.plan->may_zero_copy()) return;
  const std::size_t bytes = call.plan->input_bytes_of(call.plan->program().rank);
  const SharedTensorLocation location = LocalProcess::instance().find(call.tensors[0].in, bytes);
  call.tensor_slot = location.slot;
  call.tensor_id = location.id;
  call.tensor_offset = location.offset;
  if (call.plan->may_single_copy()) call.address = reinterpret_cast<std::uintptr_t>(call.tensors[0].in);
}

py::list reports_of(const std::vector<SizeClassReport>& reports) {
  py::list result;
  for (const SizeClassReport& report : reports) {
    const Variant& variant = report.variant;
    py::dict fields;
    fields["size_class"] = report.name;
    fields["piece_bytes"] = variant.piece_bytes;
    fields["single_copy"] = variant.single_copy;
    fields["stream_payload"] = variant.stream_payload;
    fields["stream_output"] = variant.stream_output;
    fields["alternative"] = variant.alternative;
    fields["parallel"] = variant.parallel;
    fields["microseconds"] = report.microseconds;
    fields["trials"] = report.trials;
    fields["settled"] = report.settled;
    result.append(fields);
  }
  return result;
}

py::object text_of(const std::string& text) {
  PyObject* const decoded = PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace");
  if (!decoded) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(decoded);
}

void translate_error(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const char* name = "DtcommError";
    if (error.kind() == ErrorKind::timeout) name = "CollectiveTimeout";
    if (error.kind() == ErrorKind::peer_lost) name = "PeerLost";
    if (error.kind() == ErrorKind::mismatch) name = "CollectiveMismatch";
    if (error.kind() == ErrorKind::corrupt) name = "PayloadCorrupt";
    raise(name, error.what());
  } catch (const ClosedError& error) {
    raise("CommunicatorClosed", error.what());
  } catch (const std::system_error& error) {
    // OSError chooses the subclass by the number.
    const py::object arguments = py::make_tuple(error.code().value(), text_of(error.what()));
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

void set_python_error(std::exception_ptr pointer) {
  try {
    translate_error(std::move(pointer));
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "unknown C++ exception");
  }
}

void select_engine_kernels(const std::string& name) {
  const Kernels* kernels = find_kernels(name.c_str());
  if (!kernels && name != "reference") throw py::value_error("no kernels named '" + name + "' run on this CPU");
  engine_kernels.store(kernels);
}

std::string engine_kernels_name() {
  const Kernels* kernels = engine_kernels.load(std::memory_order_relaxed);
  return kernels ? kernels->name : "reference";
}

}  // namespace dtcomm::python
