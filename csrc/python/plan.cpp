// Bindings of programs, plans and the chunk layout.
#include "engine/plan.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/arguments.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace dtcomm::python {
namespace {

Geometry geometry_of(int number) {
  if (number < 0 || number > static_cast<int>(Geometry::exchange)) {
    throw py::value_error("geometry: 0 (whole), 1 (scatter), 2 (gather) or 3 (exchange)");
  }
  return static_cast<Geometry>(number);
}

ReduceOp op_of(int number) {
  if (number < 0 || number > static_cast<int>(ReduceOp::max)) throw py::value_error("op: 0 (sum), 1 (min) or 2 (max)");
  return static_cast<ReduceOp>(number);
}

// (elements, dtype, codec, codec between hosts); codecs are 16 bytes.
using SegmentTuple = std::tuple<std::size_t, int, std::string, std::string>;

std::vector<Segment> segments_of(const std::vector<SegmentTuple>& tuples) {
  std::vector<Segment> segments;
  for (const auto& [numel, dtype, codec, between] : tuples) {
    segments.push_back(
        {numel, dtype_of(dtype), codec_of(std::string_view(codec)), codec_of(std::string_view(between))});
  }
  return segments;
}

// (segment, input offset, output offset, elements)
using RangeTuple = std::tuple<std::uint32_t, std::size_t, std::size_t, std::size_t>;

Status validate_chunk_layout(const ChunkLayout& layout, const std::vector<SegmentShape>& segments) {
  if (layout.chunks < 1 || layout.ranks < 1) return Status::error("chunks, ranks: must be at least 1");
  const bool exchange = layout.geometry == Geometry::exchange;
  if (exchange && layout.chunks != layout.ranks * layout.ranks) {
    return Status::error("chunks: an exchange has one for each pair of ranks");
  }
  if (!layout.splits->empty() && (!exchange || layout.splits->size() != layout.chunks || segments.size() != 1)) {
    return Status::error("splits: one for each chunk of an exchange of one segment");
  }
  for (const SegmentShape& segment : segments) {
    if (segment.granule < 1) return Status::error("segments: a granule has at least 1 element");
  }
  return Status();
}

std::vector<std::vector<std::vector<RangeTuple>>> chunk_layout(
    int geometry, const std::vector<std::pair<std::size_t, std::size_t>>& segments, std::size_t chunks,
    std::size_t ranks, const std::vector<std::size_t>& splits, std::size_t elements) {
  std::vector<SegmentShape> shapes;
  for (const auto& [numel, granule] : segments) shapes.push_back({numel, granule});
  const ChunkLayout layout{geometry_of(geometry), chunks, ranks, &splits};
  raise_if_invalid(validate_chunk_layout(layout, shapes));
  std::vector<std::vector<std::vector<RangeTuple>>> result(chunks);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    for (const auto& piece : cut_chunk(layout, shapes, chunk, elements ? elements : SIZE_MAX / 2)) {
      result[chunk].emplace_back();
      for (const ElementRange& range : piece) {
        result[chunk].back().emplace_back(range.segment, range.in_offset, range.out_offset, range.numel);
      }
    }
  }
  return result;
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<Program, std::shared_ptr<Program>>(module, "NativeProgram")
      .def(py::init([](int rank, int ranks, int chunks, std::vector<int> boxes, const std::vector<std::int64_t>& flat) {
             return std::make_shared<Program>(Program::parse(rank, ranks, chunks, std::move(boxes), flat));
           }),
           py::arg("rank"), py::arg("ranks"), py::arg("chunks"), py::arg("boxes"), py::arg("flat"))
      .def_property_readonly("max_boxes", &Program::max_boxes);
  const auto flag = [](bool Variant::* value) {
    return py::cpp_function([value](const Variants& self) { return self.tries.*value; });
  };
  const auto set_flag = [](bool Variant::* value) {
    return py::cpp_function([value](Variants& self, bool tries) { self.tries.*value = tries; });
  };
  py::class_<Variants>(module, "Variants")
      .def(from_fields<Variants>())
      .def_readwrite("piece_bytes", &Variants::piece_bytes)
      .def_readwrite("single_copy", &Variants::single_copy)
      .def_readwrite("stream_payload", &Variants::stream_payload)
      .def_readwrite("stream_output", &Variants::stream_output)
      .def_readwrite("parallel", &Variants::parallel)
      .def_readwrite("threads", &Variants::threads)
      .def_readwrite("offers", &Variants::offers)
      .def_readwrite("size_class", &Variants::size_class)
      .def_readwrite("piece_sizes", &Variants::piece_sizes)
      .def_property("tries_single_copy", flag(&Variant::single_copy), set_flag(&Variant::single_copy))
      .def_property("tries_stream_payload", flag(&Variant::stream_payload), set_flag(&Variant::stream_payload))
      .def_property("tries_stream_output", flag(&Variant::stream_output), set_flag(&Variant::stream_output))
      .def_property("tries_parallel", flag(&Variant::parallel), set_flag(&Variant::parallel))
      .def_property("tries_alternative", flag(&Variant::alternative), set_flag(&Variant::alternative))
      .def("__eq__", [](const Variants& self, const Variants& other) { return self == other; })
      .def("__hash__", [](Variants self) {
        self.set_key();
        return self.key();
      });
  py::class_<PlanSpec>(module, "PlanSpec")
      .def(from_fields<PlanSpec>())
      .def_property(
          "program", [](const PlanSpec& self) { return std::const_pointer_cast<Program>(self.program); },
          [](PlanSpec& self, std::shared_ptr<Program> program) { self.program = std::move(program); })
      .def_property(
          "geometry", [](const PlanSpec& self) { return static_cast<int>(self.geometry); },
          [](PlanSpec& self, int number) { self.geometry = geometry_of(number); })
      .def_property(
          "op", [](const PlanSpec& self) { return static_cast<int>(self.op); },
          [](PlanSpec& self, int number) { self.op = op_of(number); })
      .def_readwrite("average", &PlanSpec::average)
      .def_property(
          "segments", [](const PlanSpec& self) { return self.segments.size(); },
          [](PlanSpec& self, const std::vector<SegmentTuple>& tuples) { self.segments = segments_of(tuples); })
      .def_readwrite("text", &PlanSpec::text)
      .def_readwrite("variants", &PlanSpec::variants)
      .def_readwrite("slot_bytes", &PlanSpec::slot_bytes)
      .def_readwrite("zero_copy", &PlanSpec::zero_copy)
      .def_property(
          "alternative", [](const PlanSpec& self) { return std::const_pointer_cast<Program>(self.alternative); },
          [](PlanSpec& self, std::shared_ptr<Program> program) { self.alternative = std::move(program); })
      .def_readwrite("alternative_zero_copy", &PlanSpec::alternative_zero_copy)
      .def_readwrite("checksum", &PlanSpec::checksum)
      .def_readwrite("max_boxes", &PlanSpec::max_boxes)
      .def_readwrite("splits", &PlanSpec::splits)
      .def_readwrite("call_info", &PlanSpec::call_info);
  py::class_<Plan, std::shared_ptr<Plan>>(module, "NativePlan")
      .def(py::init([](const PlanSpec& spec) {
             if (!spec.program) throw py::value_error("program: a plan needs one");
             return std::make_shared<Plan>(spec);
           }),
           py::arg("spec"))
      .def_property_readonly("pieces", &Plan::pieces)
      .def_property_readonly("memory_bytes", &Plan::memory_bytes)
      .def_property_readonly("max_boxes", &Plan::max_boxes)
      .def_property_readonly("fingerprint", &Plan::fingerprint);
  module.def("chunk_layout", &chunk_layout, py::arg("geometry"), py::arg("segments"), py::arg("chunks"),
             py::arg("ranks"), py::arg("splits") = std::vector<std::size_t>(), py::arg("elements") = 0,
             "Where each chunk of a schedule lies in the tensors of a call, cut into pieces of at least `elements` "
             "elements (0: uncut). `geometry`: 0 whole, 1 scatter, 2 gather, 3 exchange; `segments`: (elements, "
             "elements of a granule). Returns [chunk][piece] of (segment, input offset, output offset, elements).");
}

}  // namespace dtcomm::python
