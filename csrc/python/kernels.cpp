// Bindings of the CPU kernels. They take addresses and release the GIL. dtcomm/kernels/cpu.py checks the arguments;
// only what would otherwise be undefined behaviour is checked here.
#include <cstdlib>
#include <string>
#include <vector>

#include <pybind11/stl.h>

#include "codec/counter_rng.h"
#include "codec/validate.h"
#include "cpu/kernels.h"
#include "python/arguments.h"
#include "python/bindings.h"
#include "python/grouped_calls.h"
#include "python/without_gil.h"

namespace dtcomm::python {

namespace py = pybind11;

namespace {

void combine(const char* kernel, const py::bytes& codec_bytes, const std::vector<std::uintptr_t>& payloads,
             int position, std::uintptr_t local, int local_dtype, std::uintptr_t residual_in,
             std::uintptr_t residual_out, std::size_t numel, std::size_t divisor, int op, std::uint64_t key,
             std::uint64_t offset, std::uintptr_t payload_out, std::uintptr_t out, int dtype, int out_dtype,
             bool stream_payload, bool stream_out) {
  const Kernels& kernels = kernels_of(kernel);
  const Codec codec = codec_of(codec_bytes);
  Combine call = combine_call(payloads, position, local, local_dtype, residual_in, residual_out, numel, divisor, op,
                              key, offset, payload_out, out, dtype, out_dtype);
  call.stream_payload = stream_payload;
  call.stream_out = stream_out;
  without_gil([&] { kernels.combine(codec, call); });
}

void decode(const char* kernel, const py::bytes& codec_bytes, std::uintptr_t payload, std::size_t numel, int dtype,
            std::uintptr_t out, int out_dtype, bool stream) {
  const Kernels& kernels = kernels_of(kernel);
  const Codec codec = codec_of(codec_bytes);
  const DType from = dtype_of(dtype), to = dtype_of(out_dtype);
  without_gil([&] {
    kernels.decode(codec, pointer<const std::uint8_t>(payload), numel, from, pointer<void>(out), to, stream);
  });
}

void require_element_size(std::size_t size) {
  if (size != 2 && size != 4) throw py::value_error("size: elements have 2 or 4 bytes");
}

std::size_t encode_lossless(const char* kernel, std::uintptr_t x, std::size_t numel, std::size_t size,
                            std::uintptr_t payload) {
  const Kernels& kernels = kernels_of(kernel);
  require_element_size(size);
  return without_gil(
      [&] { return kernels.lossless.encode(pointer<const void>(x), numel, size, pointer<std::uint8_t>(payload)); });
}

std::string decode_lossless(const char* kernel, std::uintptr_t payload, std::size_t bytes, std::size_t numel,
                            std::size_t size, std::uintptr_t out) {
  const Kernels& kernels = kernels_of(kernel);
  require_element_size(size);
  const char* const error = without_gil([&] {
    return kernels.lossless.decode(pointer<const std::uint8_t>(payload), bytes, numel, size, pointer<void>(out));
  });
  return error ? error : "";
}

// Outputs of at least this size are written around the cache; dtcomm/kernels/cpu.py says why.
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

void run_grouped(GroupedCalls& group, const char* kernel, const std::vector<std::uintptr_t>& addresses,
                 std::uint64_t seed) {
  const Kernels& kernels = kernels_of(kernel);
  const Codec& codec = group.codec();
  std::vector<Combine> calls = group.resolve(addresses, seed);
  without_gil([&] {
    for (Combine& call : calls) {
      call.stream_payload = wire_bytes(codec, call.numel, call.dtype) >= kStreamBytes;
      call.stream_out = call.numel * size_of(call.out_dtype) >= kStreamBytes;
      const bool decodes = call.count == 1 && !call.local && !call.residual_in && !call.residual_out &&
                           !call.payload_out && call.divisor == 1;
      if (decodes) {
        kernels.decode(codec, call.payloads[0], call.numel, call.dtype, call.out, call.out_dtype, call.stream_out);
      } else {
        kernels.combine(codec, call);
      }
    }
  });
}

// For benchmarks: `repeats` calls on fp32 tensors without Python between them, which takes longer than a call on a
// kilobyte. A single payload that is only decoded goes through Kernels::decode, everything else is a sum.
void repeat_kernel(const char* kernel, const py::bytes& codec_bytes, const std::vector<std::uintptr_t>& payloads,
                   std::uintptr_t local, std::uintptr_t residual, std::size_t numel, std::uintptr_t payload_out,
                   std::uintptr_t out, bool stream_payload, bool stream_out, int repeats) {
  const Kernels& kernels = kernels_of(kernel);
  const Codec codec = codec_of(codec_bytes);
  constexpr int kF32 = static_cast<int>(DType::f32), kSum = static_cast<int>(ReduceOp::sum);
  constexpr std::uint64_t kKey = 7;
  Combine call = combine_call(payloads, static_cast<int>(payloads.size()), local, kF32, residual, residual, numel, 1,
                              kSum, kKey, 0, payload_out, out, kF32, kF32);
  call.stream_payload = stream_payload;
  call.stream_out = stream_out;
  const bool decodes = call.count == 1 && !local && !residual && !payload_out;
  without_gil([&] {
    for (int i = 0; i < repeats; ++i) {
      if (decodes) {
        kernels.decode(codec, call.payloads[0], numel, DType::f32, call.out, DType::f32, stream_out);
      } else {
        kernels.combine(codec, call);
      }
    }
  });
}

}  // namespace

void bind_kernels(py::module_& module) {
  module.def(
      "kernels",
      [] {
        std::vector<std::pair<std::string, bool>> all;
        for (const Kernels* const* kernels = all_kernels(); *kernels; ++kernels) {
          all.emplace_back((*kernels)->name, (*kernels)->supported());
        }
        return all;
      },
      "All builds of the kernels, best first: (name, whether this CPU can run it).");
  // For each call of a kernel: os.environ takes longer than the encoding of a kilobyte. Its assignments arrive here.
  module.def(
      "kernel_variable",
      [] {
        const char* const value = std::getenv("DTCOMM_KERNEL");
        return py::reinterpret_steal<py::str>(PyUnicode_DecodeFSDefault(value ? value : ""));
      },
      "The value of the environment variable DTCOMM_KERNEL; empty if it is not set.");
  module.def(
      "wire_bytes",
      [](const py::bytes& codec, std::size_t numel, int dtype) {
        return wire_bytes(codec_of(codec), numel, dtype_of(dtype));
      },
      py::arg("codec"), py::arg("numel"), py::arg("dtype"));
  module.def(
      "granule_elements", [](const py::bytes& codec) { return granule_elements(codec_of(codec)); }, py::arg("codec"));
  module.def(
      "payload_error",
      [](const py::bytes& codec_bytes, std::uintptr_t payload, std::size_t numel) {
        const Codec codec = codec_of(codec_bytes);
        return without_gil([&] { return check_payload(codec, pointer<const std::uint8_t>(payload), numel).message(); });
      },
      py::arg("codec"), py::arg("payload"), py::arg("numel"),
      "The first invalid granule of a payload and what is wrong with it; empty if the payload is valid.");
  module.def(
      "mix_key", [](std::uint64_t seed, std::uint32_t rank, std::uint32_t step) { return mix_key(seed, rank, step); },
      py::arg("seed"), py::arg("rank"), py::arg("step"), "The key of one encoding, for stochastic rounding.");
  module.def("combine", &combine, py::arg("kernel"), py::arg("codec"), py::arg("payloads"), py::arg("position"),
             py::arg("local"), py::arg("local_dtype"), py::arg("residual_in"), py::arg("residual_out"),
             py::arg("numel"), py::arg("divisor"), py::arg("op"), py::arg("key"), py::arg("offset"),
             py::arg("payload_out"), py::arg("out"), py::arg("dtype"), py::arg("out_dtype"), py::arg("stream_payload"),
             py::arg("stream_out"), "One call of Kernels::combine on raw addresses.");
  module.def("decode", &decode, py::arg("kernel"), py::arg("codec"), py::arg("payload"), py::arg("numel"),
             py::arg("dtype"), py::arg("out"), py::arg("out_dtype"), py::arg("stream"),
             "One call of Kernels::decode on raw addresses.");
  bind_grouped_calls(module).def("run", &run_grouped, py::arg("kernel"), py::arg("addresses"), py::arg("seed"),
                                 "Run the calls on the memory at these addresses; 0: that memory is not there.");
  module.def("encode_lossless", &encode_lossless, py::arg("kernel"), py::arg("x"), py::arg("numel"), py::arg("size"),
             py::arg("payload"), "Writes the payload of elements of 2 or 4 bytes; returns its bytes.");
  module.def("decode_lossless", &decode_lossless, py::arg("kernel"), py::arg("payload"), py::arg("bytes"),
             py::arg("numel"), py::arg("size"), py::arg("out"),
             "Decodes a payload; returns what is wrong with it, or an empty string.");
  module.def("repeat_kernel", &repeat_kernel, py::arg("kernel"), py::arg("codec"), py::arg("payloads"),
             py::arg("local"), py::arg("residual"), py::arg("numel"), py::arg("payload_out"), py::arg("out"),
             py::arg("stream_payload"), py::arg("stream_out"), py::arg("repeats"),
             "For benchmarks: runs one combine or decode of fp32 tensors `repeats` times.");
}

}  // namespace dtcomm::python
