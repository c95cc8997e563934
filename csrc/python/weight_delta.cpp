// Bindings of deltas of weights. They take addresses and release the GIL; dtcomm/extensions/weights/codec.py checks the
// arguments.
#include "engine/weight_delta.h"

#include "python/arguments.h"
#include "python/bindings.h"
#include "python/without_gil.h"

namespace dtcomm::python {

namespace py = pybind11;

namespace {

WeightKind weight_kind_of(unsigned number) {
  if (number >= kWeightKinds) throw py::value_error("kind: unknown number");
  return static_cast<WeightKind>(number);
}

}  // namespace

void bind_weight_delta(py::module_& module) {
  py::class_<DeltaWriter>(module, "DeltaWriter")
      .def(py::init([](unsigned kind, std::size_t numel) { return DeltaWriter(weight_kind_of(kind), numel); }))
      .def("add",
           [](DeltaWriter& writer, const char* kernel, std::size_t first, std::size_t n, std::uintptr_t old,
              std::uintptr_t fresh, int threads) {
             const Kernels& kernels = kernels_of(kernel);
             return without_gil([&] {
               return writer.add(kernels, first, n, pointer<const void>(old), pointer<const void>(fresh), threads);
             });
           })
      .def_property_readonly("bytes", &DeltaWriter::bytes)
      .def("write", [](const DeltaWriter& writer, std::uintptr_t to) {
        without_gil([&] { writer.write(pointer<std::uint8_t>(to)); });
      });
  py::class_<DeltaReader>(module, "DeltaReader")
      .def(py::init([](std::uintptr_t payload, std::size_t bytes) {
        return DeltaReader(pointer<const std::uint8_t>(payload), bytes);
      }))
      .def_property_readonly("error", &DeltaReader::error)
      .def_property_readonly("kind", [](const DeltaReader& reader) { return static_cast<unsigned>(reader.kind()); })
      .def_property_readonly("numel", &DeltaReader::numel)
      .def("decode", [](const DeltaReader& reader, const char* kernel, std::size_t first, std::size_t n,
                        std::uintptr_t old, std::uintptr_t out, int threads, bool checked) {
        const Kernels& kernels = kernels_of(kernel);
        return without_gil([&] {
          return reader.decode(kernels, first, n, pointer<const void>(old), pointer<void>(out), threads, checked)
              .message();
        });
      });
}

}  // namespace dtcomm::python
