// Bindings of the epilogue of a summed activation. They take addresses and release the GIL; dtcomm/kernels/epilogue.py
// checks the arguments.
//
// `quantized` are the addresses of codes and scales, the scales of a row, and whether codes are int8; zeros: none.
#include "cpu/epilogue.h"

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "python/arguments.h"
#include "python/bindings.h"
#include "python/local_tasks.h"
#include "python/without_gil.h"

namespace dtcomm::python {

namespace py = pybind11;

namespace {

using QuantizedOutput = std::tuple<std::uintptr_t, std::uintptr_t, std::size_t, bool>;

Epilogue call_of(std::size_t features, int dtype, std::uintptr_t bias, std::uintptr_t residual, std::uintptr_t out,
                 std::uintptr_t weight, float eps, std::uintptr_t norm_out, const QuantizedOutput& quantized) {
  Epilogue call;
  call.features = features;
  call.dtype = dtype_of(dtype);
  if (call.dtype != DType::f32 && call.dtype != DType::f16 && call.dtype != DType::bf16) {
    throw py::value_error("dtype: must be fp32, fp16 or bf16");
  }
  call.bias = pointer<const void>(bias);
  call.residual = pointer<const void>(residual);
  call.out = pointer<void>(out);
  call.weight = pointer<const void>(weight);
  call.eps = eps;
  call.norm_out = pointer<void>(norm_out);
  const auto& [codes, scales, groups, to_int8] = quantized;
  call.codes = pointer<std::uint8_t>(codes);
  call.scales = pointer<float>(scales);
  call.groups = groups;
  call.to_int8 = to_int8;
  if (call.codes && (!call.scales || groups == 0 || features % groups != 0)) {
    throw py::value_error("quantized: needs scales, as many for each row as divide the features");
  }
  return call;
}

NativeTask epilogue_task(std::size_t numel, std::size_t features, int dtype, std::uintptr_t bias,
                         std::uintptr_t residual, std::uintptr_t out, std::uintptr_t weight, float eps,
                         std::uintptr_t norm_out, const QuantizedOutput& quantized) {
  if (features == 0 || numel % features != 0) throw py::value_error("features: must divide the elements");
  const auto state = std::make_shared<StreamedEpilogue>(
      call_of(features, dtype, bias, residual, out, weight, eps, norm_out, quantized), numel);
  NativeTask task;
  task.run = [state, numel](const Kernels& kernels) { state->arrived(kernels, 0, numel); };
  task.epilogue.apply = [state](const Kernels& kernels, std::size_t first, std::size_t n) {
    state->arrived(kernels, first, n);
  };
  const std::size_t bytes = numel * size_of(state->call().dtype);
  const Epilogue& call = state->call();
  task.epilogue.memory = {{call.residual, bytes},
                          {call.norm_out, bytes},
                          {call.codes, numel},
                          {call.scales, numel / features * call.groups * sizeof(float)}};
  return task;
}

}  // namespace

void bind_epilogue(py::module_& module) {
  module.def(
      "epilogue",
      [](const char* kernel, const py::bytes& codec_bytes,
         const std::vector<std::pair<std::uintptr_t, std::size_t>>& payloads, std::size_t features, int dtype,
         std::uintptr_t bias, std::uintptr_t residual, std::uintptr_t out, std::uintptr_t weight, float eps,
         std::uintptr_t norm_out, const QuantizedOutput& quantized) {
        const Kernels& kernels = kernels_of(kernel);
        const Codec codec = codec_of(codec_bytes);
        std::vector<PayloadRun> runs;
        for (const auto& [payload, numel] : payloads) runs.push_back({pointer<const std::uint8_t>(payload), numel});
        const Epilogue call = call_of(features, dtype, bias, residual, out, weight, eps, norm_out, quantized);
        without_gil([&] { epilogue(kernels, codec, runs, call); });
      },
      py::arg("kernel"), py::arg("codec"), py::arg("runs"), py::arg("features"), py::arg("dtype"), py::arg("bias"),
      py::arg("residual"), py::arg("out"), py::arg("weight"), py::arg("eps"), py::arg("norm_out"), py::arg("quantized"),
      "One call of dtcomm::epilogue on raw addresses; runs are (address, elements).");
  module.def(
      "task_epilogue", &epilogue_task, py::arg("numel"), py::arg("features"), py::arg("dtype"), py::arg("bias"),
      py::arg("residual"), py::arg("out"), py::arg("weight"), py::arg("eps"), py::arg("norm_out"), py::arg("quantized"),
      "A task that applies the epilogue to the sums in `out`, all at once or piece by piece as they become final.");
}

}  // namespace dtcomm::python
