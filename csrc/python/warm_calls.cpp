// Warm calls: a collective that was called before with the same arguments, and needs no plan or check any more, is one
// call from Python. The table is keyed by the arguments of the Python functions, tensors by size and dtype.
// dtcomm/runtime/warm_calls.py says when an entry is made and dropped.
//
// The functions are plain CPython functions, since pybind11's dispatch takes as long as the rest of the call.
#include <array>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "engine/communicator.h"
#include "engine/hash.h"
#include "engine/progress_thread.h"
#include "python/bindings.h"
#include "python/engine_calls.h"
#include "python/warm_arguments.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace dtcomm::python {
namespace {

constexpr std::size_t kEntries = 512;   // a power of two
constexpr std::size_t kMaxOptions = 5;  // of a collective
// A message that fits into the slots and is at most so long is in them sooner than its receiver can answer.
constexpr std::size_t kSentAtOnceBytes = 16 * 1024;
// Every rank waits for another one: where they take turns on the cores, it has to leave its core at once.
constexpr WaitPolicy kTakesTurns{64, 1000 * 1000};

// The arguments of a call, all borrowed: (collective, group, input, output, options...).
struct Arguments {
  PyObject* collective = nullptr;
  PyObject* group = nullptr;
  TensorView input, output;
  bool same_tensor = false;  // input and output are one object
  PyObject* const* options = nullptr;
  std::size_t count = 0;  // of the options
};

std::uint64_t hash_of(const Arguments& arguments) {
  std::uint64_t hash = mix64(hash_argument(arguments.collective), reinterpret_cast<std::uintptr_t>(arguments.group));
  hash = mix64(hash, arguments.input.numel * 3 + arguments.output.numel);
  hash = mix64(hash, std::uint64_t{arguments.input.dtype} << 32 | arguments.output.dtype);
  for (std::size_t i = 0; i < arguments.count; ++i) hash = mix64(hash, hash_argument(arguments.options[i]));
  return hash;
}

struct WarmCall {
  // The key. The group is not held: its communicators are closed, and all entries dropped, before it is freed.
  py::object collective;
  PyObject* group = nullptr;
  TensorView input, output;
  bool same_tensor = false;
  std::array<py::object, kMaxOptions> options;
  std::size_t count = 0;

  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Plan> plan;
  std::shared_ptr<CallCounter> calls;
  bool has_input = false, has_output = false;  // on this rank
  std::size_t rank = 0;
  py::object failed;  // called with the exception of a call that failed

  bool matches(const Arguments& arguments) const {
    if (arguments.group != group || arguments.count != count || arguments.same_tensor != same_tensor) return false;
    if (!equal_arguments(arguments.collective, collective.ptr())) return false;
    if (arguments.input.numel != input.numel || arguments.input.dtype != input.dtype) return false;
    if (arguments.output.numel != output.numel || arguments.output.dtype != output.dtype) return false;
    for (std::size_t i = 0; i < count; ++i) {
      if (!equal_arguments(arguments.options[i], options[i].ptr())) return false;
    }
    return true;
  }

  // Whether input and output may lie where they do: apart, or one is this rank's shard of the other.
  bool allows_memory(const Arguments& arguments) const {
    const TensorView &in = arguments.input, &out = arguments.output;
    if (arguments.same_tensor || in.data + in.bytes <= out.data || out.data + out.bytes <= in.data) return true;
    const TensorView &whole = in.bytes > out.bytes ? in : out, &part = in.bytes > out.bytes ? out : in;
    return whole.bytes != part.bytes && part.data == whole.data + rank * part.bytes;
  }
};

// All warm calls of the process. Accessed with the GIL, and never destroyed: it holds Python objects.
struct WarmCalls {
  PyObject* groups = nullptr;  // the dictionary of torch.distributed.distributed_c10d
  PyObject *world_name = nullptr, *default_name = nullptr, *map_name = nullptr;
  py::object make_work;  // the Python handle of an operation: (NativeWork, arguments, failed) -> Work
  std::array<std::unique_ptr<WarmCall>, kEntries> entries;  // by hash; a new one replaces the one at its place

  static WarmCalls& instance() {
    static auto* const calls = new WarmCalls;
    return *calls;
  }

  // Reads the arguments; false if the tensors cannot be read, or the group is not in use.
  bool parse(PyObject* tuple, Arguments& arguments) const {
    PyObject* const* const objects = &PyTuple_GET_ITEM(tuple, 0);
    const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(tuple));
    if (count < 4 || count > 4 + kMaxOptions || !groups) return false;
    if (objects[2] != Py_None && !tensor_reader().read(objects[2], arguments.input)) return false;
    arguments.same_tensor = objects[2] == objects[3];
    if (arguments.same_tensor) {
      arguments.output = arguments.input;
    } else if (objects[3] != Py_None && !tensor_reader().read(objects[3], arguments.output)) {
      return false;
    }
    arguments.collective = objects[0];
    arguments.options = objects + 4;
    arguments.count = count - 4;
    arguments.group = registered_group(objects[1]);
    return arguments.group != nullptr;
  }

  // The entry of a call; null if there is none.
  const WarmCall* find(PyObject* tuple, Arguments& arguments) const {
    if (!parse(tuple, arguments)) return nullptr;
    const WarmCall* const entry = entries[hash_of(arguments) % kEntries].get();
    return entry && entry->matches(arguments) && entry->allows_memory(arguments) ? entry : nullptr;
  }

  // The group, or the default group for None; null if torch does not list it. Borrowed: torch holds it.
  PyObject* registered_group(PyObject* group) const {
    PyObject* const world = PyDict_GetItemWithError(groups, world_name);
    if (!world) return nullptr;
    const auto map = py::reinterpret_steal<py::object>(PyObject_GetAttr(world, map_name));
    py::object default_group;
    if (map && group == Py_None) {
      default_group = py::reinterpret_steal<py::object>(PyObject_GetAttr(world, default_name));
      group = default_group.ptr();
    }
    if (!map || !group || PySequence_Contains(map.ptr(), group) != 1) {
      PyErr_Clear();
      return nullptr;
    }
    return group;
  }
};

Call call_of(const WarmCall& entry, const Arguments& arguments) {
  TensorPointers tensors{entry.has_input ? arguments.input.data : nullptr,
                         entry.has_output ? arguments.output.data : nullptr, nullptr};
  return make_call(entry.plan, {tensors}, entry.calls->next());
}

// Runs the operation, or queues it; returns the handle of a queued one.
std::shared_ptr<Work> start(const WarmCall& entry, const Arguments& arguments, bool asynchronous) {
  // Another thread may drop the entry while this one waits without the GIL.
  const std::shared_ptr<Communicator> communicator = entry.communicator;
  Call call = call_of(entry, arguments);
  return without_gil([&]() -> std::shared_ptr<Work> {
    locate_input(call);
    if (!asynchronous) {
      communicator->run(std::move(call));
      return nullptr;
    }
    std::shared_ptr<Work> work = communicator->submit(std::move(call));
    work->communicator = communicator;
    return work;
  });
}

// Runs a message that is sent and one that is received at the same time. Sets `sending_failed` before it throws the
// failure of the former. Neither is under way when it returns or throws, since the tensors are the caller's.
void exchange(const WarmCall& sent, const Arguments& sent_arguments, const WarmCall& received,
              const Arguments& received_arguments, bool& sending_failed) {
  const std::shared_ptr<Communicator> sender = sent.communicator, receiver = received.communicator;
  Call send = call_of(sent, sent_arguments), receive = call_of(received, received_arguments);
  without_gil([&] {
    locate_input(send);
    const bool at_once = send.plan->offers() && send.plan->input_bytes() <= kSentAtOnceBytes;
    // This thread waits at once and then does the progress thread's work, which need not be woken for it.
    std::optional<ProgressThread::HelpingWaiter> helper;
    if (!at_once && receiver->waiters_help_progress && !ProgressThread::instance().has_latency()) {
      helper.emplace(receiver.get());
    }
    sending_failed = true;
    const std::shared_ptr<Work> sending = sender->submit(std::move(send), true);
    std::exception_ptr failure;
    try {
      if (at_once) {
        receiver->run(std::move(receive), receiver->cores_per_rank() < 1 ? &kTakesTurns : nullptr);
      } else {
        receiver->wait(receiver->submit(std::move(receive), true));
      }
    } catch (...) {
      failure = std::current_exception();
      sending_failed = false;
    }
    try {
      sender->wait(sending);
    } catch (...) {
      if (!failure) throw;
    }
    if (failure) std::rethrow_exception(failure);
  });
}

// Calls `failed` with the exception that is being handled, and leaves that set for Python.
void report(const py::object& failed) {
  set_python_error(std::current_exception());
  py::error_already_set error;
  try {
    failed(error.value());
  } catch (py::error_already_set& other) {
    other.discard_as_unraisable("dtcomm: the record of a failed operation");
  }
  error.restore();
}

// start_warm(arguments, async_op) -> False | True | Work
PyObject* start_warm(PyObject* /*module*/, PyObject* const* objects, Py_ssize_t count) {
  const int asynchronous = count == 2 && PyTuple_CheckExact(objects[0]) ? PyObject_IsTrue(objects[1]) : -1;
  if (asynchronous < 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "start_warm: expected a tuple and a bool");
    return nullptr;
  }
  WarmCalls& calls = WarmCalls::instance();
  Arguments arguments;
  const WarmCall* const entry = calls.find(objects[0], arguments);
  if (!entry) Py_RETURN_FALSE;
  const py::object failed = entry->failed;
  try {
    std::shared_ptr<Work> work = start(*entry, arguments, asynchronous != 0);
    if (!work) Py_RETURN_TRUE;
    return calls.make_work(std::move(work), py::handle(objects[0]), failed).release().ptr();
  } catch (...) {
    report(failed);
    return nullptr;
  }
}

PyMethodDef start_warm_definition = {
    "start_warm", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&start_warm)), METH_FASTCALL,
    "start_warm(arguments, async_op) -> False | True | Work\n\n"
    "Runs an operation that was given to keep_warm with equal arguments and returns True, or starts it and returns "
    "its\n"
    "Work. False: it did nothing."};

// exchange_warm(sent, received) -> bool
PyObject* exchange_warm(PyObject* /*module*/, PyObject* const* objects, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(objects[0]) || !PyTuple_CheckExact(objects[1])) {
    PyErr_SetString(PyExc_TypeError, "exchange_warm: expected two tuples");
    return nullptr;
  }
  const WarmCalls& calls = WarmCalls::instance();
  Arguments sent_arguments, received_arguments;
  const WarmCall* const sent = calls.find(objects[0], sent_arguments);
  const WarmCall* const received = sent ? calls.find(objects[1], received_arguments) : nullptr;
  if (!received) Py_RETURN_FALSE;
  const py::object failed_sent = sent->failed, failed_received = received->failed;
  bool sending_failed = false;
  try {
    exchange(*sent, sent_arguments, *received, received_arguments, sending_failed);
    Py_RETURN_TRUE;
  } catch (...) {
    report(sending_failed ? failed_sent : failed_received);
    return nullptr;
  }
}

PyMethodDef exchange_warm_definition = {
    "exchange_warm", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&exchange_warm)), METH_FASTCALL,
    "exchange_warm(sent, received) -> bool\n\n"
    "Runs a message that is sent and one that is received, both of which were given to keep_warm, at the same time.\n"
    "False: it did nothing."};

void keep_warm(const py::tuple& objects, std::shared_ptr<Communicator> communicator, std::shared_ptr<Plan> plan,
               std::shared_ptr<CallCounter> calls, std::size_t rank, bool has_input, bool has_output,
               py::object failed) {
  WarmCalls& table = WarmCalls::instance();
  Arguments arguments;
  if (!table.parse(objects.ptr(), arguments)) return;
  auto entry = std::make_unique<WarmCall>();
  entry->collective = py::reinterpret_borrow<py::object>(arguments.collective);
  entry->group = arguments.group;
  entry->input = arguments.input;
  entry->output = arguments.output;
  entry->same_tensor = arguments.same_tensor;
  entry->count = arguments.count;
  for (std::size_t i = 0; i < arguments.count; ++i) {
    entry->options[i] = py::reinterpret_borrow<py::object>(arguments.options[i]);
  }
  entry->communicator = std::move(communicator);
  entry->plan = std::move(plan);
  entry->calls = std::move(calls);
  entry->rank = rank;
  entry->has_input = has_input;
  entry->has_output = has_output;
  entry->failed = std::move(failed);
  table.entries[hash_of(arguments) % kEntries].swap(entry);
}

void forget_warm() {
  for (auto& place : WarmCalls::instance().entries) {
    const std::unique_ptr<WarmCall> entry = std::move(place);  // its end may run Python code
  }
}

}  // namespace

void bind_warm_calls(py::module_& module) {
  module.def(
      "initialize_warm_calls",
      [](const py::module_& c10d, py::object make_work) {
        WarmCalls& calls = WarmCalls::instance();
        calls.make_work = std::move(make_work);
        calls.world_name = PyUnicode_InternFromString("_world");
        calls.default_name = PyUnicode_InternFromString("default_pg");
        calls.map_name = PyUnicode_InternFromString("pg_map");
        calls.groups = PyModule_GetDict(c10d.inc_ref().ptr());
      },
      py::arg("c10d"), py::arg("make_work"),
      "Says where torch keeps its process groups, and what makes the handle of an operation from (NativeWork, "
      "arguments, "
      "failed).");
  module.def("keep_warm", &keep_warm, py::arg("arguments"), py::arg("communicator"), py::arg("plan"), py::arg("calls"),
             py::arg("rank"), py::arg("has_input"), py::arg("has_output"), py::arg("failed"),
             "Lets start_warm run an operation that was run with these arguments.");
  module.def("forget_warm", &forget_warm, "Drops all that keep_warm has kept.");
  for (PyMethodDef* const definition : {&start_warm_definition, &exchange_warm_definition}) {
    module.attr(definition->ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(definition, nullptr));
  }
}

}  // namespace dtcomm::python
