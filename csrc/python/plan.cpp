// Bindings of programs, plans and the chunk layout.
#include "engine/plan.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
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

// (elements, dtype, codec, codec between hosts); codecs are 16 bytes.
using SegmentTuple = std::tuple<std::size_t, int, std::string, std::string>;

Geometry geometry_of(int number) {
  if (number < 0 || number > static_cast<int>(Geometry::exchange)) {
    throw py::value_error("geometry: 0 (whole), 1 (scatter), 2 (gather) or 3 (exchange)");
  }
  return static_cast<Geometry>(number);
}

// (piece_bytes, single_copy, stream_payload, stream_output, parallel, offers)
using VariantTuple = std::tuple<std::size_t, bool, bool, bool, bool, bool>;
// What is tried: (size class or "", sizes of pieces, single_copy, stream_payload, stream_output, parallel)
using SpaceTuple = std::tuple<std::string, std::vector<std::size_t>, bool, bool, bool, bool>;

VariantSpace space_of(const Variant& initial, const SpaceTuple& tuple) {
  VariantSpace space;
  bool single_copy = false, stream_payload = false, stream_output = false, parallel = false;
  std::tie(space.size_class, space.piece_bytes, single_copy, stream_payload, stream_output, parallel) = tuple;
  if (space.size_class.empty()) return space;
  const auto bits = [](bool single, bool payload, bool output, bool several_threads) {
    return (single ? VariantSpace::kSingleCopy : 0) | (payload ? VariantSpace::kStreamPayload : 0) |
           (output ? VariantSpace::kStreamOutput : 0) | (several_threads ? VariantSpace::kParallel : 0);
  };
  const auto size = std::find(space.piece_bytes.begin(), space.piece_bytes.end(), initial.piece_bytes);
  if (size == space.piece_bytes.end()) throw py::value_error("space: its pieces lack the size of the variant");
  space.tried = bits(single_copy, stream_payload, stream_output, parallel);
  space.initial = static_cast<unsigned>(size - space.piece_bytes.begin()) << VariantSpace::kPieceShift |
                  bits(initial.single_copy, initial.stream_payload, initial.stream_output, initial.parallel);
  return space;
}

std::shared_ptr<Plan> make_plan(std::shared_ptr<Program> program, int geometry, int op, bool average,
                                const std::vector<SegmentTuple>& tuples, std::size_t slot_bytes, bool zero_copy,
                                const std::string& text, std::size_t max_boxes, std::vector<std::size_t> splits,
                                bool checksum, const std::string& call_info, const VariantTuple& variant,
                                const SpaceTuple& space, int threads, std::shared_ptr<Program> alternative,
                                bool alternative_zero_copy) {
  std::vector<Segment> segments;
  for (const auto& [numel, dtype, codec, between] : tuples) {
    segments.push_back(
        {numel, dtype_of(dtype), codec_of(std::string_view(codec)), codec_of(std::string_view(between))});
  }
  if (op < 0 || op > static_cast<int>(ReduceOp::max)) throw py::value_error("op: 0 (sum), 1 (min) or 2 (max)");
  PlanOptions options;
  std::tie(options.variant.piece_bytes, options.variant.single_copy, options.variant.stream_payload,
           options.variant.stream_output, options.variant.parallel, options.offers) = variant;
  options.threads = threads;
  options.space = space_of(options.variant, space);
  if (alternative) options.space.tried |= VariantSpace::kAlternative;
  options.alternative = std::move(alternative);
  options.alternative_zero_copy = alternative_zero_copy;
  options.slot_bytes = slot_bytes;
  options.zero_copy = zero_copy;
  options.checksum = checksum;
  options.max_boxes = max_boxes;
  options.splits = std::move(splits);
  options.call_info = call_info;
  return std::make_shared<Plan>(std::move(program), geometry_of(geometry), static_cast<ReduceOp>(op), average,
                                std::move(segments), options, text);
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
  py::class_<Plan, std::shared_ptr<Plan>>(module, "NativePlan")
      .def(py::init(&make_plan), py::kw_only(), py::arg("program"), py::arg("geometry"), py::arg("op"),
           py::arg("average"), py::arg("segments"), py::arg("slot_bytes"), py::arg("zero_copy"), py::arg("text"),
           py::arg("max_boxes"), py::arg("splits"), py::arg("checksum"), py::arg("call_info"), py::arg("variant"),
           py::arg("space"), py::arg("threads"), py::arg("alternative") = nullptr,
           py::arg("alternative_zero_copy") = false)
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
