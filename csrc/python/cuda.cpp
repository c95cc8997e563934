// The `_cuda` module. Memory and streams come as integers (`tensor.data_ptr()`, `stream.cuda_stream`).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "codec/layout.h"
#include "cuda/device_info.h"
#include "cuda/kernels.h"
#include "python/arguments.h"
#include "python/cuda.h"
#include "python/grouped_calls.h"
#include "python/without_gil.h"

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

Codec device_codec_of(const py::bytes& bytes) {
  const Codec codec = codec_of(bytes);
  if (codec.family == Family::exact) throw py::value_error("codec: exact has no CUDA kernel");
  return codec;
}

// Checks what a kernel would otherwise misread or fault on. dtcomm/kernels/cuda.py checks tensors; here are only
// addresses.
void check(const Codec& codec, const Combine& call, std::uintptr_t table) {
  const bool native_sum = codec.family == Family::none && !floating(call.dtype);
  if (!native_sum) {
    check_floats("dtype", call.dtype);
    check_floats("local_dtype", call.local_dtype);
    check_floats("out_dtype", call.out_dtype);
  } else if (call.local_dtype != call.dtype || call.out_dtype != call.dtype || call.residual_in || call.residual_out) {
    throw py::value_error("dtype: is summed as itself, without a residual");
  }
  const bool cast = codec.family == Family::none || codec.family == Family::fp16 || codec.family == Family::bf16;
  if (call.op != ReduceOp::sum && !cast) throw py::value_error("op: min and max need none, fp16 or bf16");
  if (call.count > cuda::kInlinePayloads && !table) {
    throw py::value_error("table: more than " + std::to_string(cuda::kInlinePayloads) +
                          " payloads need their addresses on the device too");
  }
  for (int t = 0; t < call.count; ++t) {
    check_aligned("payloads", reinterpret_cast<std::uintptr_t>(call.payloads[t]), kAlign);
  }
  check_aligned("local", reinterpret_cast<std::uintptr_t>(call.local), size_of(call.local_dtype));
  check_aligned("residual_in", reinterpret_cast<std::uintptr_t>(call.residual_in), sizeof(float));
  check_aligned("residual_out", reinterpret_cast<std::uintptr_t>(call.residual_out), sizeof(float));
  check_aligned("payload_out", reinterpret_cast<std::uintptr_t>(call.payload_out), kAlign);
  check_aligned("out", reinterpret_cast<std::uintptr_t>(call.out), size_of(call.out_dtype));
}

void combine(const py::bytes& codec_bytes, const std::vector<std::uintptr_t>& payloads, std::uintptr_t table,
             int position, std::uintptr_t local, int local_dtype, std::uintptr_t residual_in,
             std::uintptr_t residual_out, std::size_t numel, std::size_t divisor, int op, std::uint64_t key,
             std::uint64_t offset, std::uintptr_t payload_out, std::uintptr_t out, int dtype, int out_dtype,
             std::uintptr_t stream) {
  const Codec codec = device_codec_of(codec_bytes);
  const Combine call = combine_call(payloads, position, local, local_dtype, residual_in, residual_out, numel, divisor,
                                    op, key, offset, payload_out, out, dtype, out_dtype);
  check(codec, call, table);
  without_gil([&] {  // a full queue blocks
    raise_if_not_queued(cuda::combine(codec, call, pointer<const std::uint8_t* const>(table), pointer<void>(stream)));
  });
}

void decode(const py::bytes& codec_bytes, std::uintptr_t payload, std::size_t numel, int dtype_number,
            std::uintptr_t out, int out_dtype_number, std::uintptr_t stream) {
  const Codec codec = device_codec_of(codec_bytes);
  const DType dtype = dtype_of(dtype_number), out_dtype = dtype_of(out_dtype_number);
  if (!(codec.family == Family::none && dtype == out_dtype)) {
    check_floats("dtype", dtype);
    check_floats("out_dtype", out_dtype);
  }
  check_aligned("payload", payload, kAlign);
  check_aligned("out", out, size_of(out_dtype));
  without_gil([&] {
    raise_if_not_queued(cuda::decode(codec, pointer<const std::uint8_t>(payload), numel, dtype, pointer<void>(out),
                                     out_dtype, pointer<void>(stream)));
  });
}

void run_grouped(GroupedCalls& group, const std::vector<std::uintptr_t>& addresses, std::uint64_t seed,
                 std::uintptr_t stream) {
  if (group.codec().family == Family::exact) throw py::value_error("codec: exact has no CUDA kernel");
  const std::vector<Combine> calls = group.resolve(addresses, seed);
  for (const Combine& call : calls) check(group.codec(), call, 0);
  without_gil([&] {
    raise_if_not_queued(cuda::combine_all(group.codec(), calls.data(), calls.size(), nullptr, pointer<void>(stream)));
  });
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "dtcomm's CUDA kernels";
  module.def("platform", &platform,
             "Driver and runtime versions (1000 * major + 10 * minor), devices, and why there are none. Never raises.");
  module.attr("INLINE_PAYLOADS") = cuda::kInlinePayloads;
  module.def("combine", &combine, py::arg("codec"), py::arg("payloads"), py::arg("table"), py::arg("position"),
             py::arg("local"), py::arg("local_dtype"), py::arg("residual_in"), py::arg("residual_out"),
             py::arg("numel"), py::arg("divisor"), py::arg("op"), py::arg("key"), py::arg("offset"),
             py::arg("payload_out"), py::arg("out"), py::arg("dtype"), py::arg("out_dtype"), py::arg("stream"),
             "One call of cuda::combine, queued on the stream of the current device; addresses are the device's. "
             "`table`: with more than INLINE_PAYLOADS payloads, where the device finds their addresses; else 0.");
  bind_grouped_calls(module).def(
      "run", &run_grouped, py::arg("addresses"), py::arg("seed"), py::arg("stream"),
      "Queue the calls on the memory at these addresses of the device; 0: that memory is not there.");
  module.def("decode", &decode, py::arg("codec"), py::arg("payload"), py::arg("numel"), py::arg("dtype"),
             py::arg("out"), py::arg("out_dtype"), py::arg("stream"),
             "out = the decoded payload in out_dtype, queued on the stream; addresses are the device's.");
  bind_cuda_fused(module);
  bind_cuda_low_rank(module);
  bind_cuda_rounded_sum(module);
}

}  // namespace dtcomm::python
