// Repeated calls: a collective or a kernel verb that was called before with equal arguments needs no plan and no check
// any more, so it is one call from Python. One table holds them, keyed by the arguments of the Python functions,
// tensors by size and dtype. dtcomm/runtime/plans.py says when the entry of a collective is made and dropped;
// dtcomm/kernels calls the functions for encode and decode.
//
// The functions are plain CPython functions, since pybind11's dispatch takes as long as the rest of the call.
#include <Python.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>

#include "engine/communicator.h"
#include "engine/platform.h"
#include "engine/progress_thread.h"
#include "python/arguments.h"
#include "python/bindings.h"
#include "python/engine_calls.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace dtcomm::python {
namespace {

constexpr std::size_t kEntries = 2048;  // a power of two
constexpr std::size_t kMaxOptions = 6;  // of a call
// A message that fits into the slots and is at most so long is in them sooner than its receiver can answer.
constexpr std::size_t kSentAtOnceBytes = 16 * 1024;
// Every rank waits for another one: where they take turns on the cores, it has to leave its core at once.
constexpr WaitPolicy kTakesTurns{64, 1000 * 1000};

// A contiguous tensor in the memory of the CPU.
struct TensorView {
  std::uint8_t* data = nullptr;
  std::size_t numel = 0;
  std::size_t bytes = 0;
  std::uint32_t dtype = 0;  // equal for tensors of the same dtype

  bool alike(const TensorView& other) const { return numel == other.numel && dtype == other.dtype; }
  bool overlaps(const TensorView& other) const { return data < other.data + other.bytes && other.data < data + bytes; }
};

// Reads tensors of torch without a header of torch, by the C functions that torch.Tensor offers as a capsule named
// "dlpack_exchange_api" (DLPack 1.3, which specifies the layouts below). It takes some nanoseconds; torch's methods
// take some dozens each.
class TensorReader {
 public:
  static constexpr std::uint32_t kFloat32 = 2 << 8 | 32, kUint8 = 1 << 8 | 8;

  // `tensor_type` is torch.Tensor, `capsule` its exchange functions or None. Without them no tensor can be read.
  void initialize(PyObject* tensor_type, PyObject* capsule) {
    if (capsule == Py_None) return;
    const auto* api = static_cast<const Api*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    if (!api) {
      PyErr_Clear();
      return;
    }
    while (api && api->header.major != 1) api = reinterpret_cast<const Api*>(api->header.previous);
    if (!api) return;
    is_neg_ = PyUnicode_InternFromString("is_neg");
    if (!is_neg_) throw py::error_already_set();
    Py_INCREF(tensor_type);
    tensor_type_ = tensor_type;
    read_ = api->read;
  }

  // False if the object is not exactly a torch.Tensor, or not contiguous memory of the CPU that holds its values.
  bool read(PyObject* object, TensorView& view) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != tensor_type_ || !read_) return false;
    Tensor tensor;
    if (read_(object, &tensor) != 0) {  // a sparse tensor, for example
      PyErr_Clear();
      return false;
    }
    if (tensor.device_type != kCpu || tensor.lanes != 1) return false;
    std::int64_t numel = 1;
    for (int i = tensor.dimensions - 1; i >= 0; --i) {
      if (tensor.strides && tensor.shape[i] != 1 && tensor.strides[i] != numel) return false;
      numel *= tensor.shape[i];
    }
    if (!tensor.data && numel) return false;  // its storage was freed
    if (tensor.code == kFloat && is_negated(object)) return false;
    view.data = static_cast<std::uint8_t*>(tensor.data) + tensor.byte_offset;
    view.numel = static_cast<std::size_t>(numel);
    view.bytes = view.numel * tensor.bits / 8;
    view.dtype = std::uint32_t{tensor.code} << 8 | tensor.bits;
    return true;
  }

 private:
  static constexpr std::int32_t kCpu = 1;
  static constexpr std::uint8_t kFloat = 2;

  // Whether the memory has the negatives of a tensor's values, as that of the imaginary part of a conjugate view.
  bool is_negated(PyObject* tensor) const {
    PyObject* const answer = PyObject_CallMethodNoArgs(tensor, is_neg_);
    if (!answer) PyErr_Clear();
    Py_XDECREF(answer);
    return answer != Py_False;
  }

  struct Tensor {
    void* data;
    std::int32_t device_type, device_id;
    std::int32_t dimensions;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    const std::int64_t* shape;
    const std::int64_t* strides;  // null: contiguous
    std::uint64_t byte_offset;
  };
  struct Header {
    std::uint32_t major, minor;
    const Header* previous;
  };
  struct Api {
    Header header;
    void *allocate, *export_managed, *import_managed;
    int (*read)(void* object, Tensor* tensor);  // null if there is none
    void* current_stream;
  };

  PyObject *tensor_type_ = nullptr, *is_neg_ = nullptr;
  int (*read_)(void* object, Tensor* tensor) = nullptr;
};

// Strings and integers are compared by value, everything else by identity.
std::uint64_t hash_of(PyObject* object) {
  if (PyUnicode_CheckExact(object) || PyLong_CheckExact(object))
    return static_cast<std::uint64_t>(PyObject_Hash(object));
  return reinterpret_cast<std::uintptr_t>(object) >> 4;
}

bool equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b)) return PyUnicode_Compare(a, b) == 0;
  return PyLong_CheckExact(a) && PyLong_CheckExact(b) && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

// What distinguishes calls. All objects are borrowed. The first option of a collective is its name; a kernel verb has
// its codec alone, no group, and the tensor and the payload as input and output.
struct Arguments {
  PyObject* group = nullptr;
  TensorView input, output;
  bool same_tensor = false;  // input and output are one object
  bool has_residual = false;
  PyObject* const* options = nullptr;
  std::size_t count = 0;  // of the options

  std::size_t place() const {
    std::uint64_t hash = reinterpret_cast<std::uintptr_t>(group) + has_residual;
    const auto add = [&](std::uint64_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15; };
    add(input.numel * 3 + output.numel);
    add(std::uint64_t{input.dtype} << 32 | output.dtype);
    for (std::size_t i = 0; i < count; ++i) add(hash_of(options[i]));
    return mix64(hash) % kEntries;
  }
};

// A collective: what runs it.
struct Operation {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Plan> plan;
  std::shared_ptr<CallCounter> calls;
  bool has_input = false, has_output = false;  // on this rank
  std::size_t rank = 0;
  py::object failed;  // called with the exception of a call that failed
};

// A kernel verb: what is known of a codec, a size and a dtype.
struct Format {
  py::object torch_dtype;
  Codec codec;
  DType dtype = DType::f32;
};

struct Entry {
  // The key. The group is not held: its communicators are closed, and its entries dropped, before it is freed.
  Arguments key;
  std::array<py::object, kMaxOptions> options;

  std::optional<Operation> operation;  // or
  Format format;

  bool matches(const Arguments& arguments) const {
    if (arguments.group != key.group || arguments.count != key.count || arguments.same_tensor != key.same_tensor)
      return false;
    if (arguments.has_residual != key.has_residual || !arguments.input.alike(key.input)) return false;
    if (!arguments.output.alike(key.output)) return false;
    for (std::size_t i = 0; i < key.count; ++i) {
      if (!equal(arguments.options[i], options[i].ptr())) return false;
    }
    return true;
  }
};

// Whether input and output of a collective may lie where they do: apart, or one is this rank's shard of the other.
bool allows_memory(const Operation& operation, const Arguments& arguments) {
  const TensorView &in = arguments.input, &out = arguments.output;
  if (arguments.same_tensor || !in.overlaps(out)) return true;
  const TensorView &whole = in.bytes > out.bytes ? in : out, &part = in.bytes > out.bytes ? out : in;
  return whole.bytes != part.bytes && part.data == whole.data + operation.rank * part.bytes;
}

// Finds process groups where torch keeps them. This is the only place in C++ that reads private names of torch
// (dtcomm/torch_compat.py lists them).
class Groups {
 public:
  // `c10d` is torch.distributed.distributed_c10d. Without an initialization no group is found.
  void initialize(const py::module_& c10d) {
    world_name_ = PyUnicode_InternFromString("_world");
    default_name_ = PyUnicode_InternFromString("default_pg");
    map_name_ = PyUnicode_InternFromString("pg_map");
    plain_default_name_ = PyUnicode_InternFromString("_default_pg");
    plain_map_name_ = PyUnicode_InternFromString("_pg_map");
    names_ = PyModule_GetDict(c10d.inc_ref().ptr());
    const py::object world = c10d.attr("_world");
    const bool plain = py::hasattr(world, plain_default_name_) && py::hasattr(c10d, plain_map_name_) &&
                       world.attr(map_name_).is(c10d.attr(plain_map_name_));
    if (plain) plain_type_ = Py_TYPE(world.inc_ref().ptr());
  }

  // The group, or the default group for None; null if torch does not list it. Borrowed: torch holds it.
  PyObject* find(PyObject* group) const {
    PyObject* const world = names_ ? PyDict_GetItemWithError(names_, world_name_) : nullptr;
    if (!world) return nullptr;
    // The properties of the usual world are functions in Python: they take longer than the rest of the search.
    const bool plain = Py_TYPE(world) == plain_type_;
    const auto map = plain ? py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(names_, plain_map_name_))
                           : py::reinterpret_steal<py::object>(PyObject_GetAttr(world, map_name_));
    py::object default_group;
    if (map && group == Py_None) {
      default_group =
          py::reinterpret_steal<py::object>(PyObject_GetAttr(world, plain ? plain_default_name_ : default_name_));
      group = default_group.ptr();
    }
    if (!map || !group || PySequence_Contains(map.ptr(), group) != 1) {
      PyErr_Clear();
      return nullptr;
    }
    return group;
  }

 private:
  PyObject* names_ = nullptr;  // the dictionary of the module
  PyObject *world_name_ = nullptr, *default_name_ = nullptr, *map_name_ = nullptr;
  PyObject *plain_default_name_ = nullptr, *plain_map_name_ = nullptr;  // where the properties above find their values
  PyTypeObject* plain_type_ = nullptr;
};

// All repeated calls of the process. Accessed with the GIL, and never destroyed: it holds Python objects.
struct Table {
  TensorReader reader;
  Groups groups;
  PyObject* native_name = nullptr;
  py::object make_work;        // the Python handle of an operation: (NativeWork, operands, failed) -> Work
  bool kernel_forced = false;  // by dtcomm.kernels.use
  std::array<std::unique_ptr<Entry>, kEntries> entries;  // by hash; a new one replaces the one at its place

  static Table& instance() {
    static auto* const table = new Table;
    return *table;
  }

  const Entry* find(const Arguments& arguments) const {
    const Entry* const entry = entries[arguments.place()].get();
    return entry && entry->matches(arguments) ? entry : nullptr;
  }

  // An entry for these arguments, in place of the one at its place.
  void keep(const Arguments& arguments, std::unique_ptr<Entry> entry) {
    entry->key = arguments;
    entry->key.options = nullptr;  // the entry holds its own
    for (std::size_t i = 0; i < arguments.count; ++i)
      entry->options[i] = py::reinterpret_borrow<py::object>(arguments.options[i]);
    entries[arguments.place()].swap(entry);
  }

  // Reads (group, input, output, collective, options...); false if the tensors cannot be read, or the group is not in
  // use.
  bool parse(PyObject* tuple, Arguments& arguments) const {
    PyObject* const* const objects = &PyTuple_GET_ITEM(tuple, 0);
    const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(tuple));
    if (count < 4 || count > 3 + kMaxOptions) return false;
    if (objects[1] != Py_None && !reader.read(objects[1], arguments.input)) return false;
    arguments.same_tensor = objects[1] == objects[2];
    if (arguments.same_tensor) {
      arguments.output = arguments.input;
    } else if (objects[2] != Py_None && !reader.read(objects[2], arguments.output)) {
      return false;
    }
    arguments.options = objects + 3;
    arguments.count = count - 3;
    arguments.group = groups.find(objects[0]);
    return arguments.group != nullptr;
  }

  // The operation of a call; null if it is not known, or its memory needs a look.
  const Operation* find_operation(PyObject* tuple, Arguments& arguments) const {
    if (!parse(tuple, arguments)) return nullptr;
    const Entry* const entry = find(arguments);
    return entry && allows_memory(*entry->operation, arguments) ? &*entry->operation : nullptr;
  }
};

// The arguments of run_repeated that are not part of the key, read.
struct Extras {
  TensorView residual;
  std::optional<std::uint64_t> seed;
  std::optional<NativeTask> epilogue;

  // False if one of them needs a look of Python.
  bool read(PyObject* given_seed, PyObject* given_residual, PyObject* given_epilogue) {
    const Table& table = Table::instance();
    if (given_seed != Py_None) {
      if (!PyLong_CheckExact(given_seed)) return false;
      seed = PyLong_AsUnsignedLongLongMask(given_seed);
    }
    if (given_residual != Py_None && !table.reader.read(given_residual, residual)) return false;
    if (given_epilogue == Py_None) return true;
    const auto native = py::reinterpret_steal<py::object>(PyObject_GetAttr(given_epilogue, table.native_name));
    if (!native) PyErr_Clear();
    if (!native || !py::isinstance<NativeTask>(native)) return false;
    epilogue = native.cast<NativeTask>();
    return true;
  }

  // Whether the residual is one of the input, in other memory.
  bool fits(const Arguments& arguments) const {
    return !arguments.has_residual ||
           (residual.dtype == TensorReader::kFloat32 && residual.numel == arguments.input.numel &&
            !residual.overlaps(arguments.input) && !residual.overlaps(arguments.output));
  }
};

Call call_of(const Operation& operation, const Arguments& arguments, const Extras& extras = {}) {
  TensorPointers tensors{operation.has_input ? arguments.input.data : nullptr,
                         operation.has_output ? arguments.output.data : nullptr,
                         reinterpret_cast<float*>(extras.residual.data)};
  const std::uint64_t number = operation.calls->next();
  Call call = make_call(operation.plan, {tensors}, extras.seed.value_or(number));
  if (extras.epilogue) add_tasks(call, {}, {*extras.epilogue}, 0);
  return call;
}

// Runs the operation, or queues it; returns the handle of a queued one.
std::shared_ptr<Work> start(const Operation& operation, Call call, bool asynchronous) {
  // Another thread may drop the entry while this one waits without the GIL.
  const std::shared_ptr<Communicator> communicator = operation.communicator;
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
void exchange(const Operation& sent, const Arguments& sent_arguments, const Operation& received,
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

PyObject* run_repeated(PyObject* /*module*/, PyObject* const* objects, Py_ssize_t count) {
  const bool valid = count >= 2 && count <= 5 && PyTuple_CheckExact(objects[0]);
  const int asynchronous = valid ? PyObject_IsTrue(objects[1]) : -1;
  if (asynchronous < 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "run_repeated: expected a tuple and a bool");
    return nullptr;
  }
  const auto optional = [&](Py_ssize_t i) { return i < count ? objects[i] : Py_None; };
  PyObject *const residual = optional(3), *const epilogue = optional(4);
  const Table& table = Table::instance();
  Arguments arguments;
  arguments.has_residual = residual != Py_None;
  const Operation* const operation = table.find_operation(objects[0], arguments);
  Extras extras;
  if (!operation || !extras.read(optional(2), residual, epilogue) || !extras.fits(arguments)) Py_RETURN_FALSE;
  const py::object failed = operation->failed;
  try {
    std::shared_ptr<Work> work = start(*operation, call_of(*operation, arguments, extras), asynchronous != 0);
    if (!work) Py_RETURN_NONE;
    const py::tuple operands = py::make_tuple(py::handle(objects[0]), py::handle(residual), py::handle(epilogue));
    return table.make_work(std::move(work), operands, failed).release().ptr();
  } catch (...) {
    report(failed);
    return nullptr;
  }
}

PyObject* exchange_repeated(PyObject* /*module*/, PyObject* const* objects, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(objects[0]) || !PyTuple_CheckExact(objects[1])) {
    PyErr_SetString(PyExc_TypeError, "exchange_repeated: expected two tuples");
    return nullptr;
  }
  const Table& table = Table::instance();
  Arguments sent_arguments, received_arguments;
  const Operation* const sent = table.find_operation(objects[0], sent_arguments);
  const Operation* const received = sent ? table.find_operation(objects[1], received_arguments) : nullptr;
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

// What precedes a message of the torch.distributed backend, in a header that contains a short message, too.
struct MessageStart {
  std::int64_t tag, bytes;
};

// The arguments of send_message and receive_message: (arguments of run_repeated with the header, tensor, tag).
struct Message {
  Arguments arguments;
  const Operation* operation = nullptr;  // null: it is not known, or the tensor cannot be read
  TensorView tensor;
  std::int64_t tag = 0;
  std::uint8_t* header = nullptr;

  // False with an error of Python if they are no such arguments.
  bool read(PyObject* const* objects, Py_ssize_t count) {
    if (count != 3 || !PyTuple_CheckExact(objects[0])) {
      PyErr_SetString(PyExc_TypeError, "expected a tuple, a tensor and a tag");
      return false;
    }
    tag = PyLong_AsLongLong(objects[2]);
    if (tag == -1 && PyErr_Occurred()) return false;
    const Table& table = Table::instance();
    if (table.reader.read(objects[1], tensor)) operation = table.find_operation(objects[0], arguments);
    header = arguments.input.data;
    return true;
  }
};

PyObject* send_message(PyObject* /*module*/, PyObject* const* objects, Py_ssize_t count) {
  Message message;
  if (!message.read(objects, count)) return nullptr;
  const Operation* const operation = message.operation;
  const MessageStart start_of_message{message.tag, static_cast<std::int64_t>(message.tensor.bytes)};
  if (!operation || sizeof start_of_message + message.tensor.bytes > message.arguments.input.bytes) Py_RETURN_FALSE;
  std::memcpy(message.header, &start_of_message, sizeof start_of_message);
  if (message.tensor.bytes)
    std::memcpy(message.header + sizeof start_of_message, message.tensor.data, message.tensor.bytes);
  const py::object failed = operation->failed;
  try {
    std::shared_ptr<Work> work = start(*operation, call_of(*operation, message.arguments), true);
    if (work->finished() && !work->failure()) Py_RETURN_NONE;
    const py::tuple operands = py::make_tuple(py::handle(objects[0]), py::none(), py::none());
    return Table::instance().make_work(std::move(work), operands, failed).release().ptr();
  } catch (...) {
    report(failed);
    return nullptr;
  }
}

PyObject* receive_message(PyObject* /*module*/, PyObject* const* objects, Py_ssize_t count) {
  Message message;
  if (!message.read(objects, count)) return nullptr;
  const Operation* const operation = message.operation;
  if (!operation) Py_RETURN_FALSE;
  const py::object failed = operation->failed;
  try {
    start(*operation, call_of(*operation, message.arguments), false);
  } catch (...) {
    report(failed);
    return nullptr;
  }
  MessageStart arrived;
  std::memcpy(&arrived, message.header, sizeof arrived);
  const std::size_t bytes = message.tensor.bytes;
  const bool is_inline = sizeof arrived + bytes <= message.arguments.output.bytes;
  if (arrived.tag != message.tag || arrived.bytes != static_cast<std::int64_t>(bytes) || !is_inline) Py_RETURN_NONE;
  if (bytes) std::memcpy(message.tensor.data, message.header + sizeof arrived, bytes);
  Py_RETURN_TRUE;
}

void keep_repeated(const py::tuple& objects, std::shared_ptr<Communicator> communicator, std::shared_ptr<Plan> plan,
                   std::shared_ptr<CallCounter> calls, std::size_t rank, bool has_input, bool has_output,
                   bool has_residual, py::object failed) {
  Table& table = Table::instance();
  Arguments arguments;
  arguments.has_residual = has_residual;
  if (!table.parse(objects.ptr(), arguments)) return;
  auto entry = std::make_unique<Entry>();
  entry->operation = Operation{std::move(communicator), std::move(plan), std::move(calls), has_input, has_output, rank,
                               std::move(failed)};
  table.keep(arguments, std::move(entry));
}

void forget_repeated() {
  for (auto& place : Table::instance().entries) {
    if (!place || !place->operation) continue;
    const std::unique_ptr<Entry> entry = std::move(place);  // its end may run Python code
  }
}

bool uint64_of(PyObject* object, std::uint64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  value = PyLong_AsUnsignedLongLong(object);
  if (!PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// What is known of a codec with these tensors; null if a kernel is forced, or nothing is known.
const Format* find_format(PyObject* const& codec, PyObject* tensor, PyObject* payload, Arguments& arguments) {
  const Table& table = Table::instance();
  if (!table.reader.read(tensor, arguments.input) || !table.reader.read(payload, arguments.output)) return nullptr;
  arguments.options = &codec;
  arguments.count = 1;
  const char* const variable = std::getenv("DTCOMM_KERNEL");
  if (table.kernel_forced || (variable && *variable)) return nullptr;
  const Entry* const entry = table.find(arguments);
  return entry ? &entry->format : nullptr;
}

PyObject* encode_repeated(PyObject* /*module*/, PyObject* const* objects, Py_ssize_t count) {
  Arguments arguments;
  Combine call;
  if (count != 5 || !uint64_of(objects[2], call.key) || !uint64_of(objects[3], call.offset)) Py_RETURN_FALSE;
  const Format* const found = find_format(objects[0], objects[1], objects[4], arguments);
  if (!found) Py_RETURN_FALSE;
  const Codec codec = found->codec;
  call.local = arguments.input.data;
  call.numel = arguments.input.numel;
  call.payload_out = arguments.output.data;
  call.dtype = call.local_dtype = call.out_dtype = found->dtype;
  without_gil([&] { best_kernels().combine(codec, call); });
  Py_RETURN_TRUE;
}

PyObject* decode_repeated(PyObject* /*module*/, PyObject* const* objects, Py_ssize_t count) {
  Arguments arguments;
  std::uint64_t numel = 0;
  if (count != 5 || !uint64_of(objects[2], numel)) Py_RETURN_FALSE;
  const Format* const found = find_format(objects[0], objects[4], objects[1], arguments);
  const TensorView &out = arguments.input, &payload = arguments.output;
  if (!found || numel != out.numel || objects[3] != found->torch_dtype.ptr()) Py_RETURN_FALSE;
  const Codec codec = found->codec;
  const DType dtype = found->dtype;
  without_gil([&] { best_kernels().decode(codec, payload.data, out.numel, dtype, out.data, dtype, false); });
  Py_RETURN_TRUE;
}

void keep_format(const py::object& name, const py::bytes& codec, const py::object& tensor, int dtype,
                 const py::object& payload) {
  Table& table = Table::instance();
  Arguments arguments;
  if (!table.reader.read(tensor.ptr(), arguments.input) || !table.reader.read(payload.ptr(), arguments.output)) return;
  if (arguments.output.dtype != TensorReader::kUint8) return;
  PyObject* const option = name.ptr();
  arguments.options = &option;
  arguments.count = 1;
  auto entry = std::make_unique<Entry>();
  entry->format = Format{tensor.attr("dtype"), codec_of(codec), dtype_of(dtype)};
  table.keep(arguments, std::move(entry));
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
PyCFunction plain(FastFunction function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef definitions[] = {
    {"run_repeated", plain(&run_repeated), METH_FASTCALL,
     "run_repeated(arguments, async_op, seed=None, residual=None, epilogue=None) -> None | Work | False\n\n"
     "Runs an operation that was given to keep_repeated with equal arguments, or starts it and returns its Work. "
     "False: it did nothing."},
    {"exchange_repeated", plain(&exchange_repeated), METH_FASTCALL,
     "exchange_repeated(sent, received) -> bool\n\nRuns a message that is sent and one that is received, both of which "
     "were given to keep_repeated, at the same time. False: it did nothing."},
    {"send_message", plain(&send_message), METH_FASTCALL,
     "send_message(sent, tensor, tag) -> None | Work | False\n\nWrites tag, size and values of the tensor to the "
     "header that is sent, and starts that message, which was given to keep_repeated. None: it is complete. False: it "
     "did nothing, because the message is not known or the tensor does not fit."},
    {"receive_message", plain(&receive_message), METH_FASTCALL,
     "receive_message(received, tensor, tag) -> True | None | False\n\nReceives what send_message sends. True: the "
     "tensor has its values. None: the header has come, and is not for this tensor and tag. False: it did nothing."},
    {"encode_repeated", plain(&encode_repeated), METH_FASTCALL,
     "encode_repeated(codec, x, key, offset, out) -> bool\n\nEncodes x if keep_format knows its format; False: it did "
     "nothing."},
    {"decode_repeated", plain(&decode_repeated), METH_FASTCALL,
     "decode_repeated(codec, payload, numel, dtype, out) -> bool\n\nDecodes the payload if keep_format knows out's "
     "format; False: it did nothing."},
};

}  // namespace

void bind_repeated_calls(py::module_& module) {
  module.def(
      "initialize_tensor_reader",
      [](const py::object& tensor_type, const py::object& exchange) {
        Table::instance().reader.initialize(tensor_type.ptr(), exchange.ptr());
      },
      py::arg("tensor_type"), py::arg("exchange"),
      "Says by which functions tensors are read: torch.Tensor.__dlpack_c_exchange_api__, or None if there are none.");
  module.def(
      "initialize_repeated_calls",
      [](const py::module_& c10d, py::object make_work) {
        Table& table = Table::instance();
        table.make_work = std::move(make_work);
        table.native_name = PyUnicode_InternFromString("native");
        table.groups.initialize(c10d);
      },
      py::arg("c10d"), py::arg("make_work"),
      "Says where torch keeps its process groups, and what makes the handle of an operation from (NativeWork, "
      "(arguments, residual, epilogue), failed).");
  module.def("keep_repeated", &keep_repeated, py::arg("arguments"), py::arg("communicator"), py::arg("plan"),
             py::arg("calls"), py::arg("rank"), py::arg("has_input"), py::arg("has_output"), py::arg("has_residual"),
             py::arg("failed"), "Lets run_repeated run an operation that was run with these arguments.");
  module.def("forget_repeated", &forget_repeated, "Drops all that keep_repeated has kept.");
  module.def("keep_format", &keep_format, py::arg("name"), py::arg("codec"), py::arg("tensor"), py::arg("dtype"),
             py::arg("payload"),
             "Lets encode_repeated and decode_repeated run the best native kernel for this codec and tensors of this "
             "size and dtype; the payload is uint8.");
  module.def(
      "set_kernel_forced", [](bool forced) { Table::instance().kernel_forced = forced; }, py::arg("forced"),
      "Whether encode_repeated and decode_repeated do nothing, because dtcomm.kernels.use forces a kernel.");
  for (PyMethodDef& definition : definitions) {
    module.attr(definition.ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, nullptr));
  }
}

}  // namespace dtcomm::python
