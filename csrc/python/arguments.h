// Conversion and checking of arguments from Python: codecs as 16 bytes, dtypes as numbers, memory as addresses.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "codec/codec.h"
#include "core/status.h"
#include "core/types.h"
#include "cpu/kernels.h"

namespace dtcomm::python {

inline void raise_if_invalid(const Status& status) {
  if (!status.ok()) throw pybind11::value_error(status.message());
}

// Fields of a codec, as csrc/codec/codec.h lays them out.
inline Codec codec_of(std::string_view fields) {
  if (fields.size() != sizeof(Codec)) throw pybind11::value_error("codec: expected 16 bytes");
  Codec codec;
  std::memcpy(&codec, fields.data(), sizeof codec);
  if (const char* reason = why_invalid(codec)) throw pybind11::value_error(reason);
  return codec;
}

inline Codec codec_of(const pybind11::bytes& bytes) { return codec_of(static_cast<std::string_view>(bytes)); }

inline DType dtype_of(int number) {
  if (number < 0 || number > static_cast<int>(DType::boolean)) throw pybind11::value_error("dtype: unknown number");
  return static_cast<DType>(number);
}

// The kernels with this name; ValueError if this CPU cannot run them or there are none.
inline const Kernels& kernels_of(const char* name) {
  const Kernels* kernels = find_kernels(name);
  if (!kernels) throw pybind11::value_error(std::string("kernel: this CPU has no kernel named ") + name);
  return *kernels;
}

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace dtcomm::python
