// Bindings of the epilogue of a summed activation. They take addresses and release the GIL; dtcomm/kernels/epilogue.py
// checks the arguments.
#include "cpu/epilogue.h"

#include <memory>
#include <string>
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

Epilogue make_epilogue(std::size_t features, int dtype, std::uintptr_t out, std::uintptr_t bias, std::uintptr_t addend,
                       std::uintptr_t weight, float eps, std::uintptr_t norm_out, std::uintptr_t codes,
                       std::uintptr_t scales, std::size_t groups, bool to_int8) {
  Epilogue call;
  call.features = features;
  call.dtype = dtype_of(dtype);
  if (call.dtype != DType::f32 && call.dtype != DType::f16 && call.dtype != DType::bf16) {
    throw py::value_error("dtype: must be fp32, fp16 or bf16");
  }
  call.bias = pointer<const void>(bias);
  call.addend = pointer<const void>(addend);
  call.out = pointer<void>(out);
  call.weight = pointer<const void>(weight);
  call.eps = eps;
  call.norm_out = pointer<void>(norm_out);
  call.codes = pointer<std::uint8_t>(codes);
  call.scales = pointer<float>(scales);
  call.groups = groups;
  call.to_int8 = to_int8;
  if (call.codes && (!call.scales || groups == 0 || features % groups != 0)) {
    throw py::value_error("scales: needed with codes, as many for each row as divide the features");
  }
  return call;
}

NativeTask epilogue_task(std::size_t numel, const Epilogue& call) {
  if (call.features == 0 || numel % call.features != 0) throw py::value_error("features: must divide the elements");
  const auto state = std::make_shared<StreamedEpilogue>(call, numel);
  NativeTask task;
  task.run = [state, numel](const Kernels& kernels) { state->arrived(kernels, 0, numel); };
  task.epilogue.apply = [state](const Kernels& kernels, std::size_t first, std::size_t n) {
    state->arrived(kernels, first, n);
  };
  const std::size_t bytes = numel * size_of(call.dtype);
  task.epilogue.memory = {{call.addend, bytes},
                          {call.norm_out, bytes},
                          {call.codes, numel},
                          {call.scales, numel / call.features * call.groups * sizeof(float)}};
  return task;
}

}  // namespace

void bind_epilogue(py::module_& module) {
  py::class_<Epilogue>(module, "Epilogue", "The tensors of an epilogue as addresses; 0: absent.")
      .def(py::init(&make_epilogue), py::kw_only(), py::arg("features"), py::arg("dtype"), py::arg("out"),
           py::arg("bias"), py::arg("addend"), py::arg("weight"), py::arg("eps"), py::arg("norm_out"), py::arg("codes"),
           py::arg("scales"), py::arg("groups"), py::arg("to_int8"));
  module.def(
      "epilogue",
      [](const char* kernel, const py::bytes& codec_bytes,
         const std::vector<std::pair<std::uintptr_t, std::size_t>>& payloads, const Epilogue& call) {
        const Kernels& kernels = kernels_of(kernel);
        const Codec codec = codec_of(codec_bytes);
        std::vector<PayloadRun> runs;
        for (const auto& [payload, numel] : payloads) runs.push_back({pointer<const std::uint8_t>(payload), numel});
        without_gil([&] { epilogue(kernels, codec, runs, call); });
      },
      py::arg("kernel"), py::arg("codec"), py::arg("runs"), py::arg("call"),
      "One call of dtcomm::epilogue on raw addresses; runs are (address, elements).");
  module.def(
      "task_epilogue", &epilogue_task, py::arg("numel"), py::arg("call"),
      "A task that applies the epilogue to the sums in `out`, all at once or piece by piece as they become final.");
}

}  // namespace dtcomm::python
