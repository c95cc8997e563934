// Conversion and checking of arguments from Python: codecs as 16 bytes, dtypes as numbers, memory as addresses.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "codec/codec.h"
#include "codec/validate.h"
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
  raise_if_invalid(check_codec(codec));
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

// The constructor of a bound struct from its fields by name; those that are not given keep their defaults.
template <class T>
auto from_fields() {
  return pybind11::init([](const pybind11::kwargs& fields) {
    T value;
    const pybind11::object self = pybind11::cast(&value, pybind11::return_value_policy::reference);
    for (const auto& [name, field] : fields) pybind11::setattr(self, name, field);
    return value;
  });
}

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A call of `combine` on the CPU or a device. `payloads` must outlive it. Raises ValueError for arguments that would be
// undefined behaviour anywhere; whether addresses and dtypes suit a kernel is for the caller to check.
inline Combine combine_call(const std::vector<std::uintptr_t>& payloads, int position, std::uintptr_t local,
                            int local_dtype, std::uintptr_t residual_in, std::uintptr_t residual_out, std::size_t numel,
                            std::size_t divisor, int op, std::uint64_t key, std::uint64_t offset,
                            std::uintptr_t payload_out, std::uintptr_t out, int dtype, int out_dtype) {
  const int count = static_cast<int>(payloads.size());
  if (position < 0 || position > count) throw pybind11::value_error("position: outside the payloads");
  if (divisor == 0) throw pybind11::value_error("divisor: must be at least 1");
  if (op < 0 || op > static_cast<int>(ReduceOp::max)) throw pybind11::value_error("op: unknown number");
  if (numel != 0 && count == 0 && !local && !residual_in) throw pybind11::value_error("combine: nothing to combine");
  Combine call;
  call.payloads = reinterpret_cast<const std::uint8_t* const*>(payloads.data());
  call.count = count;
  call.position = position;
  call.local = pointer<const void>(local);
  call.local_dtype = dtype_of(local_dtype);
  call.residual_in = pointer<const float>(residual_in);
  call.residual_out = pointer<float>(residual_out);
  call.numel = numel;
  call.divisor = divisor;
  call.op = static_cast<ReduceOp>(op);
  call.key = key;
  call.offset = offset;
  call.payload_out = pointer<std::uint8_t>(payload_out);
  call.out = pointer<void>(out);
  call.dtype = dtype_of(dtype);
  call.out_dtype = dtype_of(out_dtype);
  return call;
}

}  // namespace dtcomm::python
