// The engine as Python sees it: check, unpack, call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "engine/communicator.h"
#include "engine/crc32c.h"
#include "engine/progress_thread.h"
#include "python/bindings.h"
#include "python/engine_calls.h"

namespace py = pybind11;

namespace dtcomm::python {
namespace {

// (latency in us, ns a byte, ns of CPU time a byte)
using LinkFields = std::tuple<double, double, double>;

LinkRate rate_of(const LinkFields& fields) {
  const auto& [latency_us, ns_per_byte, cpu_ns_per_byte] = fields;
  return {static_cast<std::uint64_t>(latency_us * 1e3), ns_per_byte, cpu_ns_per_byte};
}

// (numel, dtype, codec as csrc/codec/codec.h lays it out, that of what crosses hosts)
using SegmentTuple = std::tuple<std::size_t, int, std::string, std::string>;

std::shared_ptr<Plan> make_plan(std::shared_ptr<Program> program, int geometry, int op, bool average,
                                const std::vector<SegmentTuple>& segments, std::size_t piece_bytes,
                                std::size_t slot_bytes, bool direct, const std::string& text, std::size_t max_boxes,
                                std::vector<std::size_t> splits, bool checksum, const std::string& about, bool pulls) {
  std::vector<Segment> parsed;
  for (const auto& [numel, dtype, codec, between] : segments) {
    if (codec.size() != sizeof(Codec) || between.size() != sizeof(Codec)) {
      throw py::value_error("segments: codec must be 16 bytes");
    }
    if (dtype < 0 || dtype > static_cast<int>(DType::boolean)) throw py::value_error("segments: unknown dtype");
    Segment segment{numel, static_cast<DType>(dtype), {}, {}};
    std::memcpy(&segment.codec, codec.data(), sizeof(Codec));
    std::memcpy(&segment.between, between.data(), sizeof(Codec));
    for (const Codec& each : {segment.codec, segment.between}) {
      if (const char* why = why_invalid(each)) throw py::value_error(why);
    }
    parsed.push_back(segment);
  }
  if (geometry < 0 || geometry > 3) {
    throw py::value_error("geometry: 0 (whole), 1 (scatter), 2 (gather) or 3 (exchange)");
  }
  if (op < 0 || op > 2) throw py::value_error("op: 0 (sum), 1 (min) or 2 (max)");
  PlanOptions options;
  options.piece_bytes = piece_bytes;
  options.slot_bytes = slot_bytes;
  options.direct = direct;
  options.max_boxes = max_boxes;
  options.splits = std::move(splits);
  options.checksum = checksum;
  options.about = about;
  options.pulls = pulls;
  return std::make_shared<Plan>(std::move(program), static_cast<Geometry>(geometry), static_cast<ReduceOp>(op), average,
                                std::move(parsed), options, text);
}

// (segment, input offset, output offset, elements)
using RangeTuple = std::tuple<std::uint32_t, std::size_t, std::size_t, std::size_t>;

// core/chunk_layout.h for the Python executor: [chunk][piece] of ranges. `elements` 0 leaves the chunks uncut.
std::vector<std::vector<std::vector<RangeTuple>>> chunk_layout(
    int geometry, const std::vector<std::pair<std::size_t, std::size_t>>& segments, std::size_t chunks,
    std::size_t ranks, const std::vector<std::size_t>& splits, std::size_t elements) {
  if (geometry < 0 || geometry > 3) throw py::value_error("geometry: expected 0 to 3, got " + std::to_string(geometry));
  if (chunks < 1 || ranks < 1) throw py::value_error("chunks, ranks: must be at least 1");
  const bool exchange = geometry == static_cast<int>(Geometry::exchange);
  if (exchange && chunks != ranks * ranks) throw py::value_error("chunks: an exchange has one for each pair of ranks");
  if (!splits.empty() && (!exchange || splits.size() != chunks || segments.size() != 1)) {
    throw py::value_error("splits: one for each chunk of an exchange of one segment");
  }
  std::vector<SegmentShape> shapes;
  for (const auto& [numel, granule] : segments) {
    if (granule < 1) throw py::value_error("segments: a granule has at least 1 element");
    shapes.push_back({numel, granule});
  }
  const ChunkLayout layout{static_cast<Geometry>(geometry), chunks, ranks, &splits};
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

void place_region(Call& call) {
  if (!call.plan->direct()) return;
  const std::size_t bytes = call.plan->given_bytes(call.plan->program().rank);
  const RegionPlace place = Process::instance().find(call.segments[0].in, bytes);
  call.region = place.slot;
  call.region_id = place.id;
  call.region_offset = place.offset;
  if (call.plan->pulls()) call.address = reinterpret_cast<std::uintptr_t>(call.segments[0].in);
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const char* name = "DtcommError";
    if (error.kind() == ErrorKind::timeout) name = "CollectiveTimeout";
    if (error.kind() == ErrorKind::peer_lost) name = "PeerLost";
    if (error.kind() == ErrorKind::mismatch) name = "CollectiveMismatch";
    if (error.kind() == ErrorKind::corrupt) name = "PayloadCorrupt";
    const py::object type = py::module_::import("dtcomm.errors").attr(name);
    PyErr_SetString(type.ptr(), error.what());
  }
}

void bind_communicator(py::module_& module) {
  py::class_<Work, std::shared_ptr<Work>>(module, "NativeWork")
      .def(
          "wait",
          [](const std::shared_ptr<Work>& self) {
            const auto communicator = self->finished() ? nullptr : self->communicator.lock();
            communicator ? communicator->wait(self) : self->wait();
          },
          py::call_guard<py::gil_scoped_release>())
      .def("finished", &Work::finished)
      .def("unnotify", &Work::unnotify)
      .def("raise_failure",
           [](const Work& work) {
             if (const auto failure = work.failure()) std::rethrow_exception(failure);
           })
      .def_readonly("wire_bytes", &Work::wire_bytes)
      .def_readonly("started_ns", &Work::started_ns)
      .def_readonly("finished_ns", &Work::finished_ns)
      .def("times", [](const Work& work) {
        py::list list;
        for (const Busy& busy : work.times.phases()) {
          list.append(py::make_tuple(busy.begin_ns, busy.end_ns, busy.ns));
        }
        return list;
      });

  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "NativeCommunicator")
      .def(py::init([](int rank, int ranks, std::uint32_t max_boxes, std::size_t slot_bytes, double timeout_s,
                       double yield_us, const LinkFields& inside, const LinkFields& between) {
             CommunicatorOptions options;
             options.inside = rate_of(inside);
             options.between = rate_of(between);
             options.rank = rank;
             options.ranks = ranks;
             options.max_boxes = max_boxes;
             options.slot_bytes = slot_bytes;
             options.timeout_ns = static_cast<std::uint64_t>(timeout_s * 1e9);
             options.yield_ns = static_cast<std::uint64_t>(yield_us * 1e3);
             return std::make_shared<Communicator>(options);
           }),
           py::kw_only(), py::arg("rank"), py::arg("ranks"), py::arg("max_boxes"), py::arg("slot_bytes"),
           py::arg("timeout_s"), py::arg("yield_us"), py::arg("inside") = LinkFields(),
           py::arg("between") = LinkFields())
      .def("address",
           [](const Communicator& self) {
             const PeerAddress address = self.address();
             return py::make_tuple(address.pid, address.page_fd, address.page_token, address.page, address.area_fd,
                                   address.area_token);
           })
      .def("attach",
           [](Communicator& self, const std::vector<std::tuple<int, int, std::uint64_t, std::uint64_t, int,
                                                               std::uint64_t, int, bool, std::string>>& tuples) {
             std::vector<PeerAddress> addresses;
             for (const auto& [pid, page_fd, page_token, page, area_fd, area_token, socket, between, name] : tuples) {
               addresses.push_back({pid, page_fd, page_token, page, area_fd, area_token, socket, between, name});
             }
             self.attach(addresses);
           })
      .def("why_no_pulls", &Communicator::why_no_pulls)
      .def_readwrite("probes", &Communicator::probes)
      .def_readwrite("relieves", &Communicator::relieves)
      .def(
          "set_patience",
          [](Communicator& self, int spins, double yield_us) {
            self.set_patience(spins, static_cast<std::uint64_t>(yield_us * 1e3));
          },
          py::arg("spins"), py::arg("yield_us"))
      .def("set_timeout",
           [](Communicator& self, double seconds) { self.set_timeout(static_cast<std::uint64_t>(seconds * 1e9)); })
      .def_readonly("round_trip_ns", &Communicator::round_trip_ns)
      .def_readwrite("stream_staging", &Communicator::stream_staging)
      .def("run",
           [](Communicator& self, std::shared_ptr<Plan> plan, std::uintptr_t in, std::uintptr_t out,
              std::uintptr_t residual, std::uint64_t seed) {
             Call call = make_call(std::move(plan), {unpack(in, out, residual)}, seed);
             const py::gil_scoped_release release;
             place_region(call);
             return self.run(std::move(call));
           })
      .def(
          "run_all",
          [](Communicator& self, std::shared_ptr<Plan> plan, const std::vector<PointerTuple>& tuples,
             std::uint64_t seed, const Steps& before, const Steps& after, std::uint64_t agreed) {
            Call call = make_call(std::move(plan), unpack_all(tuples), seed);
            add_steps(call, before, after, agreed);
            const py::gil_scoped_release release;
            return self.run(std::move(call));
          },
          py::arg("plan"), py::arg("pointers"), py::arg("seed"), py::arg("before") = Steps(),
          py::arg("after") = Steps(), py::arg("agreed") = 0)
      .def(
          "submit",
          [](const std::shared_ptr<Communicator>& self, std::shared_ptr<Plan> plan,
             const std::vector<PointerTuple>& tuples, std::uint64_t seed, const Steps& before, const Steps& after,
             std::uint64_t agreed) {
            Call call = make_call(std::move(plan), unpack_all(tuples), seed);
            add_steps(call, before, after, agreed);
            const py::gil_scoped_release release;
            // Peers read a tensor in shared memory as soon as the operation is announced: before any step.
            if (before.empty()) place_region(call);
            const auto work = self->submit(std::move(call));
            work->communicator = self;
            return work;
          },
          py::arg("plan"), py::arg("pointers"), py::arg("seed"), py::arg("before") = Steps(),
          py::arg("after") = Steps(), py::arg("agreed") = 0)
      .def("flights",
           [](const Communicator& self) {
             py::list list;
             for (const Flight& flight : self.flights()) {
               list.append(py::make_tuple(flight.number, flight.plan->text(), flight.plan->about(),
                                          static_cast<int>(flight.stage), flight.issued_ns, flight.started_ns,
                                          flight.finished_ns, flight.waiting_for, flight.waited_for()));
             }
             return list;
           })
      .def("sightings",
           [](Communicator& self) {
             py::list list;
             for (const Sighting& seen : self.sightings()) {
               list.append(
                   py::make_tuple(seen.last, seen.text, seen.pieces, seen.waiting_for, seen.alive, seen.closed));
             }
             return list;
           })
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("failure", &Communicator::failure)
      .def_property_readonly("operations", &Communicator::operations)
      .def_property_readonly("wire_bytes", &Communicator::total_wire_bytes)
      .def_property_readonly("pulled_bytes", &Communicator::pulled_bytes);
}

}  // namespace

void bind_engine(py::module_& module) {
  py::register_exception_translator(&translate);
  py::class_<Program, std::shared_ptr<Program>>(module, "NativeProgram")
      .def(py::init([](int rank, int ranks, int chunks, std::vector<int> boxes, const std::vector<std::int64_t>& flat) {
             return std::make_shared<Program>(Program::parse(rank, ranks, chunks, std::move(boxes), flat));
           }),
           py::arg("rank"), py::arg("ranks"), py::arg("chunks"), py::arg("boxes"), py::arg("flat"))
      .def_property_readonly("max_boxes", &Program::max_boxes);
  py::class_<Plan, std::shared_ptr<Plan>>(module, "NativePlan")
      .def(py::init(&make_plan), py::kw_only(), py::arg("program"), py::arg("geometry"), py::arg("op"),
           py::arg("average"), py::arg("segments"), py::arg("piece_bytes"), py::arg("slot_bytes"), py::arg("direct"),
           py::arg("text"), py::arg("max_boxes"), py::arg("splits"), py::arg("checksum") = false, py::arg("about") = "",
           py::arg("pulls") = false)
      .def_property_readonly("pieces", &Plan::pieces)
      .def_property_readonly("max_boxes", &Plan::max_boxes)
      .def_property_readonly("fingerprint", &Plan::fingerprint);
  module.def("chunk_layout", &chunk_layout, py::arg("geometry"), py::arg("segments"), py::arg("chunks"),
             py::arg("ranks"), py::arg("splits") = std::vector<std::size_t>(), py::arg("elements") = 0,
             "Where each chunk of a schedule lies in the tensors of a call, cut into pieces of at least `elements` "
             "elements (0: uncut). `geometry`: 0 whole, 1 scatter, 2 gather, 3 exchange; `segments`: (elements, "
             "elements of a granule). Returns [chunk][piece] of (segment, input offset, output offset, elements).");
  py::class_<Region, std::shared_ptr<Region>>(module, "Region", py::buffer_protocol())
      .def(py::init<std::size_t>(), py::arg("bytes"))
      .def_buffer([](Region& region) {
        return py::buffer_info(static_cast<std::uint8_t*>(region.data()), static_cast<py::ssize_t>(region.bytes()));
      });
  bind_communicator(module);
  module.def("set_engine_kernels", &choose_engine_kernels);
  module.def("engine_kernels", &engine_kernels_name);
  py::class_<Nic, std::unique_ptr<Nic, py::nodelete>>(module, "Nic")
      .def(py::init([](int level) { return &Nic::instance(level); }), py::arg("level"))
      .def("send", &Nic::send, py::arg("now"), py::arg("busy_ns"))
      .def("receive", &Nic::receive, py::arg("first"), py::arg("busy_ns"));
  module.def(
      "crc32c",
      [](std::uintptr_t data, std::size_t bytes, bool hardware) {
        const auto* begin = reinterpret_cast<const void*>(data);
        const py::gil_scoped_release release;
        return hardware ? crc32c(begin, bytes) : crc32c_by_table(begin, bytes);
      },
      py::arg("data"), py::arg("bytes"), py::arg("hardware") = true);
  module.def("want_times", [](bool wanted) { Times::wanted().store(wanted); });
  module.def("crc32c_in_hardware", &crc32c_in_hardware);
  module.def("notify", &Work::notify, py::arg("work"), py::arg("ticket"));
  module.def("next_completion", []() -> py::object {
    std::uint64_t ticket = 0;
    bool more = false;
    {
      const py::gil_scoped_release release;
      more = Completions::instance().next(ticket);
    }
    return more ? py::object(py::int_(ticket)) : py::object(py::none());
  });
  module.def("stop", [] {
    const py::gil_scoped_release release;
    ProgressThread::instance().stop();
    Completions::instance().stop();
  });
}

}  // namespace dtcomm::python
