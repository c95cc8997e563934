// The `_cuda` module. Memory and streams come as integers (`tensor.data_ptr()`, `stream.cuda_stream`).
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "codec/layout.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "python/arguments.h"

namespace dtcomm::python {

namespace py = pybind11;

namespace {

py::dict platform() {
  const cuda::Platform platform = cuda::platform();
  py::list devices;
  for (const cuda::Device& device : platform.devices) {
    py::dict entry;
    entry["index"] = device.index;
    entry["name"] = device.name;
    entry["capability"] = py::make_tuple(device.major, device.minor);
    entry["memory"] = device.memory;
    entry["multiprocessors"] = device.multiprocessors;
    devices.append(entry);
  }
  py::dict result;
  result["driver"] = platform.driver;
  result["runtime"] = platform.runtime;
  result["error"] = platform.error;
  result["devices"] = devices;
  return result;
}

bool floating(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

void check_aligned(const char* name, std::uintptr_t address, std::size_t to) {
  if (address % to != 0) throw py::value_error(std::string(name) + ": must be aligned to " + std::to_string(to));
}

void raise_if(const char* error) {
  if (error) throw std::runtime_error(std::string("CUDA: ") + error);
}

void encode(const py::bytes& codec_bytes, std::uintptr_t x, int dtype_number, std::size_t numel, std::uint64_t key,
            std::uint64_t offset, std::uintptr_t payload, std::uintptr_t stream) {
  const Codec codec = codec_of(codec_bytes);
  const DType dtype = dtype_of(dtype_number);
  if (codec.family != Family::none && !floating(dtype)) throw py::value_error("dtype: must be fp32, fp16 or bf16");
  check_aligned("x", x, size_of(dtype));
  check_aligned("payload", payload, kAlign);
  raise_if(cuda::encode(codec, pointer<const void>(x), dtype, numel, key, offset, pointer<std::uint8_t>(payload),
                        pointer<void>(stream)));
}

void decode(const py::bytes& codec_bytes, std::uintptr_t payload, std::size_t numel, int dtype_number,
            std::uintptr_t out, int out_dtype_number, std::uintptr_t stream) {
  const Codec codec = codec_of(codec_bytes);
  const DType dtype = dtype_of(dtype_number), out_dtype = dtype_of(out_dtype_number);
  const bool copied = codec.family == Family::none && dtype == out_dtype;
  if (!copied && !(floating(dtype) && floating(out_dtype))) {
    throw py::value_error("out_dtype: must be fp32, fp16 or bf16");
  }
  check_aligned("payload", payload, kAlign);
  check_aligned("out", out, size_of(out_dtype));
  raise_if(cuda::decode(codec, pointer<const std::uint8_t>(payload), numel, dtype, pointer<void>(out), out_dtype,
                        pointer<void>(stream)));
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "dtcomm's CUDA kernels";
  module.def("platform", &platform,
             "Driver and runtime versions (1000 * major + 10 * minor), devices, and why there are none. Never raises.");
  module.def("encode", &encode, py::arg("codec"), py::arg("x"), py::arg("dtype"), py::arg("numel"), py::arg("key"),
             py::arg("offset"), py::arg("payload"), py::arg("stream"),
             "payload = the encoding of numel elements at x, queued on the stream; addresses are the device's.");
  module.def("decode", &decode, py::arg("codec"), py::arg("payload"), py::arg("numel"), py::arg("dtype"),
             py::arg("out"), py::arg("out_dtype"), py::arg("stream"),
             "out = the decoded payload in out_dtype, queued on the stream; addresses are the device's.");
}

}  // namespace dtcomm::python
