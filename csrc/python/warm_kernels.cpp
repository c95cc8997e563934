// Repeated calls of encode and decode with `out`: the table knows the codecs, sizes and dtypes that were checked
// before, so that a call is one plain CPython function, as in warm_calls.cpp. dtcomm/kernels/eager.py calls it first.
#include <array>
#include <cstdlib>
#include <memory>

#include "engine/hash.h"
#include "python/arguments.h"
#include "python/bindings.h"
#include "python/warm_arguments.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace dtcomm::python {
namespace {

constexpr std::size_t kFormats = 1024;  // a power of two

// What is known of a codec, a size and a dtype.
struct Format {
  py::object name;  // the codec as it was given: a Codec or its text
  TensorView tensor;
  py::object torch_dtype;
  Codec codec;
  DType dtype = DType::f32;
  std::size_t payload_bytes = 0;
};

// Accessed with the GIL, and never destroyed: it holds Python objects.
struct Formats {
  std::array<std::unique_ptr<Format>, kFormats> entries;  // by hash; a new one replaces the one at its place
  std::uint32_t payload_dtype = 0;                        // uint8
  bool forced = false;                                    // a kernel is forced by dtcomm.kernels.use

  static Formats& instance() {
    static auto* const formats = new Formats;
    return *formats;
  }

  static std::size_t place(PyObject* codec, const TensorView& tensor) {
    return mix64(mix64(hash_argument(codec), tensor.numel), tensor.dtype) % kFormats;
  }

  // Null if a kernel is forced, or nothing is known.
  const Format* find(PyObject* codec, const TensorView& tensor, const TensorView& payload) const {
    const Format* const format = entries[place(codec, tensor)].get();
    if (forced || !format || tensor.numel != format->tensor.numel || tensor.dtype != format->tensor.dtype)
      return nullptr;
    if (payload.bytes != format->payload_bytes || payload.dtype != payload_dtype) return nullptr;
    const char* const variable = std::getenv("DTCOMM_KERNEL");
    return (variable && *variable) || !equal_arguments(codec, format->name.ptr()) ? nullptr : format;
  }
};

bool uint64_of(PyObject* object, std::uint64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  value = PyLong_AsUnsignedLongLong(object);
  if (!PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// encode_warm(codec, x, key, offset, out) -> bool
PyObject* encode_warm(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  TensorView x, payload;
  Combine call;
  if (count != 5 || !tensor_reader().read(arguments[1], x) || !tensor_reader().read(arguments[4], payload) ||
      !uint64_of(arguments[2], call.key) || !uint64_of(arguments[3], call.offset)) {
    Py_RETURN_FALSE;
  }
  const Format* const found = Formats::instance().find(arguments[0], x, payload);
  if (!found) Py_RETURN_FALSE;
  const Codec codec = found->codec;
  call.local = x.data;
  call.numel = x.numel;
  call.payload_out = payload.data;
  call.dtype = call.local_dtype = call.out_dtype = found->dtype;
  without_gil([&] { best_kernels().combine(codec, call); });
  Py_RETURN_TRUE;
}

// decode_warm(codec, payload, numel, dtype, out) -> bool
PyObject* decode_warm(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  TensorView payload, out;
  std::uint64_t numel = 0;
  if (count != 5 || !tensor_reader().read(arguments[1], payload) || !tensor_reader().read(arguments[4], out) ||
      !uint64_of(arguments[2], numel)) {
    Py_RETURN_FALSE;
  }
  const Format* const found = Formats::instance().find(arguments[0], out, payload);
  if (!found || numel != out.numel || arguments[3] != found->torch_dtype.ptr()) Py_RETURN_FALSE;
  const Codec codec = found->codec;
  const DType dtype = found->dtype;
  without_gil([&] { best_kernels().decode(codec, payload.data, out.numel, dtype, out.data, dtype, false); });
  Py_RETURN_TRUE;
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
PyCFunction plain(FastFunction function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef definitions[] = {
    {"encode_warm", plain(&encode_warm), METH_FASTCALL,
     "encode_warm(codec, x, key, offset, out) -> bool\n\nEncodes x if keep_format knows its format; False: it did "
     "nothing."},
    {"decode_warm", plain(&decode_warm), METH_FASTCALL,
     "decode_warm(codec, payload, numel, dtype, out) -> bool\n\nDecodes the payload if keep_format knows out's format; "
     "False: it did "
     "nothing."},
};

void keep_format(const py::object& name, const py::bytes& codec, const py::object& tensor, int dtype,
                 const py::object& payload) {
  auto format = std::make_unique<Format>();
  TensorView bytes;
  if (!tensor_reader().read(tensor.ptr(), format->tensor) || !tensor_reader().read(payload.ptr(), bytes)) return;
  format->name = name;
  format->torch_dtype = tensor.attr("dtype");
  format->codec = codec_of(codec);
  format->dtype = dtype_of(dtype);
  format->payload_bytes = bytes.bytes;
  Formats& formats = Formats::instance();
  formats.payload_dtype = bytes.dtype;
  formats.entries[Formats::place(name.ptr(), format->tensor)].swap(format);
}

}  // namespace

void bind_warm_kernels(py::module_& module) {
  module.def(
      "initialize_tensor_reader",
      [](const py::object& tensor_type, const py::object& exchange) {
        tensor_reader().initialize(tensor_type.ptr(), exchange.ptr());
      },
      py::arg("tensor_type"), py::arg("exchange"),
      "Says by which functions tensors are read: torch.Tensor.__dlpack_c_exchange_api__, or None if there are none.");
  module.def("keep_format", &keep_format, py::arg("name"), py::arg("codec"), py::arg("tensor"), py::arg("dtype"),
             py::arg("payload"),
             "Lets encode_warm and decode_warm run the best native kernel for this codec and tensors of this size and "
             "dtype; the payload is uint8.");
  module.def(
      "set_kernel_forced", [](bool forced) { Formats::instance().forced = forced; }, py::arg("forced"),
      "Whether encode_warm and decode_warm do nothing, because dtcomm.kernels.use forces a kernel.");
  for (PyMethodDef& definition : definitions) {
    module.attr(definition.ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, nullptr));
  }
}

}  // namespace dtcomm::python
