// Bindings of communicators, works and process-wide settings of the engine.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/communicator.h"
#include "engine/crc32c.h"
#include "engine/progress_thread.h"
#include "engine/thread_pool.h"
#include "net/ucx.h"
#include "python/arguments.h"
#include "python/bindings.h"
#include "python/engine_calls.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace dtcomm::python {
namespace {

// (latency in us, ns per byte, ns of CPU time per byte)
using LinkTuple = std::tuple<double, double, double>;

LinkRate link_rate(const LinkTuple& fields) {
  const auto& [latency_us, ns_per_byte, cpu_ns_per_byte] = fields;
  return {static_cast<std::uint64_t>(latency_us * 1e3), ns_per_byte, cpu_ns_per_byte};
}

std::uint64_t ns_of_us(double us) { return static_cast<std::uint64_t>(us * 1e3); }

// Longer timeouts are as good as none, and deadlines must not exceed 64 bits.
constexpr double kMaxTimeoutNs = 9e18;  // 285 years

std::uint64_t timeout_ns(const char* argument, double seconds) {
  if (!(seconds >= 0)) throw py::value_error(std::string(argument) + ": must be at least 0 seconds");
  return static_cast<std::uint64_t>(std::min(seconds * 1e9, kMaxTimeoutNs));
}

void bind_work(py::module_& module) {
  py::class_<Work, std::shared_ptr<Work>>(module, "NativeWork")
      .def("wait",
           [](const std::shared_ptr<Work>& self) {
             without_gil([&] {
               const auto communicator = self->finished() ? nullptr : self->communicator.lock();
               communicator ? communicator->wait(self) : self->wait();
             });
           })
      .def("finished", &Work::finished)
      .def("interrupt",
           [](const Work& work) {
             if (const auto communicator = work.communicator.lock()) communicator->interrupt(work);
           })
      .def("cancel_notify", &Work::cancel_notify)
      .def("raise_failure",
           [](const Work& work) {
             if (const auto failure = work.failure()) std::rethrow_exception(failure);
           })
      .def_readonly("wire_bytes", &Work::wire_bytes)
      .def_readonly("started_ns", &Work::started_ns)
      .def_readonly("finished_ns", &Work::finished_ns)
      .def(
          "phase_times",
          [](const Work& work) {
            py::list list;
            for (const PhaseTime& time : work.times.phases()) {
              list.append(py::make_tuple(time.begin_ns, time.end_ns, time.busy_ns));
            }
            return list;
          },
          "(first begin, last end, time spent) of encoding, reducing and decoding, in ns.");
  module.def("notify", &Work::notify, py::arg("work"), py::arg("ticket"),
             "Makes next_completion() return the ticket when the work is finished.");
  module.def(
      "next_completion", [] { return without_gil([] { return CompletionQueue::instance().next(); }); },
      "Waits for the ticket of a finished work; None after stop().");
}

void bind_call_counter(py::module_& module) {
  py::class_<CallCounter, std::shared_ptr<CallCounter>>(module, "CallCounter")
      .def(py::init<>())
      .def("next", &CallCounter::next)
      .def_property_readonly("value", &CallCounter::value);
}

std::shared_ptr<Communicator> make_communicator(int rank, int ranks, std::uint32_t max_boxes, std::size_t slot_bytes,
                                                double timeout_s, double yield_us, const LinkTuple& inside,
                                                const LinkTuple& between, bool wide_area) {
  CommunicatorOptions options;
  options.peers.rank = rank;
  options.peers.ranks = ranks;
  options.peers.max_boxes = max_boxes;
  options.peers.slot_bytes = slot_bytes;
  options.peers.inside = link_rate(inside);
  options.peers.between = link_rate(between);
  options.peers.wide_area = wide_area;
  options.timeout_ns = timeout_ns("timeout_s", timeout_s);
  options.wait.yield_ns = ns_of_us(yield_us);
  return {new Communicator(options), [](Communicator* communicator) {
            if (!communicator->in_forked_child()) delete communicator;
          }};
}

void bind_reports(py::module_& module) {
  py::class_<PeerAddress>(module, "Address")
      .def(from_fields<PeerAddress>())
      .def_readwrite("pid", &PeerAddress::pid)
      .def_readwrite("page_fd", &PeerAddress::page_fd)
      .def_readwrite("page_token", &PeerAddress::page_token)
      .def_readwrite("page_address", &PeerAddress::page_address)
      .def_readwrite("region_fd", &PeerAddress::region_fd)
      .def_readwrite("region_token", &PeerAddress::region_token)
      .def_readwrite("sockets", &PeerAddress::sockets)
      .def_readwrite("other_host", &PeerAddress::other_host)
      .def_readwrite("name", &PeerAddress::name);
  py::class_<FlightRecord>(module, "FlightRecord")
      .def_readonly("number", &FlightRecord::number)
      .def_property_readonly("text", [](const FlightRecord& self) { return self.plan->text(); })
      .def_property_readonly("call_info", [](const FlightRecord& self) { return self.plan->call_info(); })
      .def_property_readonly("stage", [](const FlightRecord& self) { return static_cast<int>(self.stage); })
      .def_readonly("issued_ns", &FlightRecord::issued_ns)
      .def_readonly("started_ns", &FlightRecord::started_ns)
      .def_readonly("finished_ns", &FlightRecord::finished_ns)
      .def_readonly("waiting_for", &FlightRecord::waiting_for)
      .def_property_readonly("waited_for", &FlightRecord::waited_for);
}

// The fields of `_C.Address` that a rank tells its peers.
py::dict address_of(const Communicator& communicator) {
  const PeerAddress address = communicator.address();
  py::dict fields;
  fields["pid"] = address.pid;
  fields["page_fd"] = address.page_fd;
  fields["page_token"] = address.page_token;
  fields["page_address"] = address.page_address;
  fields["region_fd"] = address.region_fd;
  fields["region_token"] = address.region_token;
  return fields;
}

// The fields of flight_recorder.PeerSnapshot.
py::list peer_snapshots(const Communicator& communicator) {
  py::list list;
  for (const PeerSnapshot& snapshot : communicator.peer_snapshots()) {
    py::dict fields;
    fields["last"] = snapshot.last_operation;
    fields["text"] = text_of(snapshot.text);
    fields["pieces"] = snapshot.pieces_done;
    fields["waiting_for"] = snapshot.waiting_for;
    fields["alive"] = snapshot.alive;
    fields["closed"] = snapshot.closed;
    list.append(fields);
  }
  return list;
}

py::list lost_connections(Communicator& communicator) {
  const auto lost = without_gil([&] {
    const auto found = communicator.connections().lost_connections();
    communicator.send_rest();
    return found;
  });
  py::list list;
  for (const RemotePeerSet::LostConnection& connection : lost) {
    const StreamBundle::LostStream& stream = connection.stream;
    list.append(py::make_tuple(connection.peer, stream.number, stream.generation, stream.reason));
  }
  return list;
}

void bind_communicator(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "NativeCommunicator")
      .def(py::init(&make_communicator), py::kw_only(), py::arg("rank"), py::arg("ranks"), py::arg("max_boxes"),
           py::arg("slot_bytes"), py::arg("timeout_s"), py::arg("yield_us"), py::arg("inside") = LinkTuple(),
           py::arg("between") = LinkTuple(), py::arg("wide_area") = false)
      .def("address", &address_of)
      .def("attach", &Communicator::attach, py::arg("addresses"))
      .def(
          "make_ucx_address", [](Communicator& self) { return py::bytes(self.make_ucx_address()); },
          "The address of this rank's endpoint of UCX. RuntimeError with the reason if UCX cannot be used.")
      .def("connect_ucx", &Communicator::connect_ucx, py::arg("addresses"),
           "Connects to the peers that are reached through sockets by the UCX addresses of all ranks.")
      .def(
          "ucx_is_connected", [](Communicator& self) { return without_gil([&] { return self.ucx_is_connected(); }); },
          "Whether all peers have connected to this rank through UCX; to be called until they have.")
      .def("ucx_lanes", &Communicator::ucx_lanes)
      .def(
          "allow_restoring", [](Communicator& self, int event_fd) { self.connections().allow_restoring(event_fd); },
          py::arg("event_fd"),
          "Connections that end will be made anew by `restore_connection`; the eventfd is written to when some have.")
      .def("lost_connections", &lost_connections, "(peer, number, generation, why it ended), of connections.")
      .def(
          "restore_connection",
          [](Communicator& self, int peer, std::size_t number, std::uint32_t generation, int fd) {
            return without_gil([&] {
              const bool restored = self.connections().restore(peer, number, generation, fd);
              self.send_rest();
              return restored;
            });
          },
          py::arg("peer"), py::arg("number"), py::arg("generation"), py::arg("fd"),
          "Puts a connected socket in the place of a connection. The engine owns it if this returns true.")
      .def(
          "end_connection",
          [](Communicator& self, int peer, std::size_t number, std::uint32_t generation) {
            without_gil([&] {
              self.connections().end_connection(peer, number, generation);
              self.send_rest();
            });
          },
          py::arg("peer"), py::arg("number"), py::arg("generation"), "The peer has lost this connection.")
      .def(
          "give_up",
          [](Communicator& self, int peer, const std::string& reason) {
            without_gil([&] { self.connections().give_up(peer, reason); });
          },
          py::arg("peer"), py::arg("reason"), "No connection to the peer can be made anew.")
      .def(
          "restoring_counts",
          [](Communicator& self) {
            if (self.in_forked_child()) return std::pair<std::size_t, std::uint64_t>();
            return without_gil([&] { return self.connections().restoring_counts(); });
          },
          "How many connections are missing, and how often one was made anew.")
      .def(
          "measured_rates",
          [](Communicator& self) {
            if (self.in_forked_child()) return std::vector<double>();
            return without_gil([&] { return self.connections().measured_rates(); });
          },
          "Bytes per second to each rank, as measured while several connections to it were busy; 0: not measured.")
      .def(
          "single_copy_error", [](const Communicator& self) { return self.can_single_copy().message(); },
          "Why this rank cannot copy out of its peers' private memory; empty if it can.")
      .def(
          "size_classes", [](const Communicator& self) { return reports_of(self.size_classes()); },
          "What the tuner has chosen, by size class.")
      .def_readwrite("waiters_help_progress", &Communicator::waiters_help_progress)
      .def("set_tuning", &Communicator::set_tuning, py::arg("cores_per_rank"), py::arg("always"))
      .def(
          "set_wait_policy",
          [](Communicator& self, int spins, double yield_us) { self.set_wait_policy({spins, ns_of_us(yield_us)}); },
          py::arg("spins"), py::arg("yield_us"))
      .def(
          "set_timeout", [](Communicator& self, double seconds) { self.set_timeout(timeout_ns("seconds", seconds)); },
          py::arg("seconds"))
      .def("run",
           [](Communicator& self, std::shared_ptr<Plan> plan, std::uintptr_t in, std::uintptr_t out,
              std::uintptr_t residual, std::uint64_t seed) {
             Call call = make_call(std::move(plan), {tensor_pointers(in, out, residual)}, seed);
             return without_gil([&] {
               locate_input(call);
               return self.run(std::move(call));
             });
           })
      .def(
          "run_all",
          [](Communicator& self, std::shared_ptr<Plan> plan, const std::vector<PointerTuple>& pointers,
             std::uint64_t seed, const Tasks& before, const Tasks& after, std::uint64_t agreed) {
            Call call = make_call(std::move(plan), tensor_pointers(pointers), seed);
            add_tasks(call, before, after, agreed);
            return without_gil([&] { return self.run(std::move(call)); });
          },
          py::arg("plan"), py::arg("pointers"), py::arg("seed"), py::arg("before") = Tasks(),
          py::arg("after") = Tasks(), py::arg("agreed") = 0)
      .def(
          "submit",
          [](const std::shared_ptr<Communicator>& self, std::shared_ptr<Plan> plan,
             const std::vector<PointerTuple>& pointers, std::uint64_t seed, const Tasks& before, const Tasks& after,
             std::uint64_t agreed) {
            Call call = make_call(std::move(plan), tensor_pointers(pointers), seed);
            add_tasks(call, before, after, agreed);
            return without_gil([&] {
              // Peers may read a tensor as soon as the operation is announced, which is before its first task runs.
              if (before.empty()) locate_input(call);
              std::shared_ptr<Work> work = self->submit(std::move(call));
              work->communicator = self;
              return work;
            });
          },
          py::arg("plan"), py::arg("pointers"), py::arg("seed"), py::arg("before") = Tasks(),
          py::arg("after") = Tasks(), py::arg("agreed") = 0)
      .def("flight_records", &Communicator::flight_records)
      .def("peer_snapshots", &peer_snapshots)
      .def("close", [](Communicator& self) { without_gil([&] { self.close(); }); })
      .def_static(
          "close_all",
          [](const std::vector<std::shared_ptr<Communicator>>& communicators) {
            std::vector<Communicator*> all;
            for (const auto& communicator : communicators) all.push_back(communicator.get());
            without_gil([&] { Communicator::close_all(all); });
          },
          py::arg("communicators"), "Closes several communicators in the time of one.")
      .def_property_readonly("failure", [](const Communicator& self) { return text_of(self.failure()); })
      .def_property_readonly("operations", &Communicator::operations)
      .def_property_readonly("wire_bytes", &Communicator::wire_bytes)
      .def_property_readonly("single_copy_bytes", &Communicator::single_copy_bytes);
}

void bind_crc32c(py::module_& module) {
  module.def(
      "crc32c",
      [](std::uintptr_t data, std::size_t bytes, bool hardware) {
        const auto* begin = reinterpret_cast<const void*>(data);
        return without_gil([&] { return hardware ? crc32c(begin, bytes) : crc32c_by_table(begin, bytes); });
      },
      py::arg("data"), py::arg("bytes"), py::arg("hardware") = true);
  module.def("crc32c_in_hardware", &crc32c_in_hardware);
}

// A peer that connects through UCX, played by a test.
class UcxPeer {
 public:
  explicit UcxPeer(std::uint64_t token) : worker_(make_ucx_worker(token)) {}

  py::bytes address() const { return worker_->address(); }
  void connect(std::uint32_t number, std::uint32_t own_number, const std::string& address) {
    channel_ = &worker_->connect(number, own_number, address, received_);
  }
  void send(std::uint32_t kind, const std::array<std::uint64_t, 5>& words, const std::string& payload, bool is_text) {
    FrameHeader frame{kind, static_cast<std::uint32_t>(payload.size()), words};
    sent_.push_back(payload);
    if (is_text) {
      channel_->enqueue(frame, payload);
    } else {
      channel_->enqueue(frame, reinterpret_cast<const std::uint8_t*>(sent_.back().data()));
    }
    channel_->flush();
  }
  // The frames that have arrived since the last call: (kind, words, payload).
  py::list receive() {
    worker_->progress();
    py::list list;
    for (const auto& [frame, payload] : received_.frames) {
      list.append(py::make_tuple(frame.kind, frame.words, py::bytes(payload)));
    }
    received_.frames.clear();
    return list;
  }
  std::string end_reason() const { return channel_->ended() ? channel_->end_reason() : ""; }

 private:
  struct Received final : FrameSink {
    std::uint8_t* payload_buffer(const FrameHeader& frame, std::uint8_t*) override {
      std::string& buffer = buffers[frame.words];
      buffer.resize(frame.bytes);
      return reinterpret_cast<std::uint8_t*>(buffer.data());
    }
    void on_frame(const FrameHeader& frame, const std::uint8_t*) override {
      frames.emplace_back(frame, std::move(buffers[frame.words]));
    }
    std::map<std::array<std::uint64_t, 5>, std::string> buffers;  // a large payload arrives after what follows it
    std::vector<std::pair<FrameHeader, std::string>> frames;
  };
  Received received_;
  std::deque<std::string> sent_;
  std::unique_ptr<UcxWorker> worker_;  // ends before what it writes to
  FrameChannel* channel_ = nullptr;
};

void bind_ucx(py::module_& module) {
  module.def(
      "open_ucx",
      [](const std::vector<std::string>& libraries) {
        const UcxDescription ucx = open_ucx(libraries);
        return py::make_tuple(ucx.version, ucx.devices);
      },
      py::arg("libraries"),
      "Opens UCX, by the first of these libraries that can be opened; returns its version and its devices. "
      "RuntimeError with the reason if that fails.");
  py::class_<UcxPeer>(module, "UcxPeer")
      .def(py::init<std::uint64_t>(), py::arg("token"))
      .def("address", &UcxPeer::address)
      .def("connect", &UcxPeer::connect, py::arg("number"), py::arg("own_number"), py::arg("address"))
      .def("send", &UcxPeer::send, py::arg("kind"), py::arg("words"), py::arg("payload") = py::bytes(),
           py::arg("is_text") = false)
      .def("receive", &UcxPeer::receive)
      .def_property_readonly("end_reason", &UcxPeer::end_reason);
}

}  // namespace

void bind_engine(py::module_& module) {
  py::register_exception_translator(&translate_error);
  set_interrupt_check(&run_interrupt_handler);
  py::class_<SharedTensorMemory, std::shared_ptr<SharedTensorMemory>>(module, "SharedTensorMemory",
                                                                      py::buffer_protocol())
      .def(py::init<std::size_t>(), py::arg("bytes"))
      .def_buffer([](SharedTensorMemory& memory) {
        return py::buffer_info(static_cast<std::uint8_t*>(memory.data()), static_cast<py::ssize_t>(memory.bytes()));
      });
  bind_work(module);
  bind_reports(module);
  bind_communicator(module);
  bind_call_counter(module);
  bind_crc32c(module);
  bind_ucx(module);
  py::class_<EmulatedNic, std::shared_ptr<EmulatedNic>>(module, "EmulatedNic")
      .def(py::init(&EmulatedNic::shared), py::arg("level"))
      .def("send", &EmulatedNic::send, py::arg("now"), py::arg("busy_ns"))
      .def("receive", &EmulatedNic::receive, py::arg("first"), py::arg("busy_ns"));
  module.def("set_engine_kernels", &select_engine_kernels, py::arg("name"));
  module.def("engine_kernels", &engine_kernels_name);
  module.def("enable_phase_times", [](bool enabled) { PhaseTimes::enabled().store(enabled); }, py::arg("enabled"));
  module.def(
      "stop",
      [] {
        without_gil([] {
          ProgressThread::instance().stop();
          ThreadPool::instance().stop();
          CompletionQueue::instance().stop();
        });
      },
      "Ends the progress thread, the helper threads and next_completion().");
  module.def(
      "share_cores", [] { ThreadPool::instance().share_cores(); },
      "Helper threads no longer spin, because threads of this process and of its peers share cores.");
  module.def(
      "helper_threads", [] { return ThreadPool::instance().helpers(); }, "The number of helper threads that run.");
}

}  // namespace dtcomm::python
