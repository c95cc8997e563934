// What Python hands over, checked: codecs as 16 bytes, dtypes as numbers, memory as addresses.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>

#include "codec/codec.h"
#include "core/types.h"

namespace dtcomm::python {

inline Codec codec_of(const pybind11::bytes& bytes) {
  char* data = nullptr;
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &length) != 0) throw pybind11::error_already_set();
  if (length != static_cast<Py_ssize_t>(sizeof(Codec))) throw pybind11::value_error("codec: expected 16 bytes");
  Codec codec;
  std::memcpy(&codec, data, sizeof codec);
  if (const char* why = why_invalid(codec)) throw pybind11::value_error(why);
  return codec;
}

inline DType dtype_of(int number) {
  if (number < 0 || number > static_cast<int>(DType::boolean)) throw pybind11::value_error("dtype: unknown number");
  return static_cast<DType>(number);
}

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace dtcomm::python
