// Arguments of Python functions that are called again and again: reading tensors, and comparing the other arguments
// with those of earlier calls. warm_calls.cpp and warm_kernels.cpp use it.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace dtcomm::python {

// A contiguous tensor in the memory of the CPU.
struct TensorView {
  std::uint8_t* data = nullptr;
  std::size_t numel = 0;
  std::size_t bytes = 0;
  std::uint32_t dtype = 0;  // equal for tensors of the same dtype
};

// Reads tensors of torch without a header of torch, by the C functions that torch.Tensor offers as a capsule named
// "dlpack_exchange_api" (DLPack 1.3, which specifies the layouts below). It takes some nanoseconds; torch's methods
// take some dozens each.
class TensorReader {
 public:
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
    Py_INCREF(tensor_type);
    tensor_type_ = tensor_type;
    read_ = api->read;
  }

  // False if the object is not exactly a torch.Tensor, or not contiguous memory of the CPU.
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
    view.data = static_cast<std::uint8_t*>(tensor.data) + tensor.byte_offset;
    view.numel = static_cast<std::size_t>(numel);
    view.bytes = view.numel * tensor.bits / 8;
    view.dtype = std::uint32_t{tensor.code} << 8 | tensor.bits;
    return true;
  }

 private:
  static constexpr std::int32_t kCpu = 1;

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

  PyObject* tensor_type_ = nullptr;
  int (*read_)(void* object, Tensor* tensor) = nullptr;
};

// The reader of this process. Used with the GIL.
inline TensorReader& tensor_reader() {
  static TensorReader reader;
  return reader;
}

// Strings and integers are compared by value, everything else by identity.
inline std::uint64_t hash_argument(PyObject* object) {
  if (PyUnicode_CheckExact(object) || PyLong_CheckExact(object))
    return static_cast<std::uint64_t>(PyObject_Hash(object));
  return reinterpret_cast<std::uintptr_t>(object) >> 4;
}

inline bool equal_arguments(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b)) return PyUnicode_Compare(a, b) == 0;
  return PyLong_CheckExact(a) && PyLong_CheckExact(b) && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

}  // namespace dtcomm::python
