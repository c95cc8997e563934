// Binding of engine/simulated_world.h: ranks of one process, stepped in an order that a seed decides.
#include "engine/simulated_world.h"

#include <utility>

#include "python/arguments.h"
#include "python/bindings.h"
#include "python/engine_calls.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace dtcomm::python {
namespace {

// (plan, pointers, seed, whether the tensor counts as lying in shared memory, tasks before and after, agreed number)
using SimulatedCall =
    std::tuple<std::shared_ptr<Plan>, std::vector<PointerTuple>, std::uint64_t, bool, Tasks, Tasks, std::uint64_t>;

Call call_of(const SimulatedCall& simulated) {
  const auto& [plan, pointers, seed, shared, before, after, agreed] = simulated;
  Call call = make_call(plan, tensor_pointers(pointers), seed);
  add_tasks(call, before, after, agreed);
  const auto address = reinterpret_cast<std::uintptr_t>(call.tensors.empty() ? nullptr : call.tensors[0].in);
  if (shared) {
    call.tensor_slot = 0;
    call.tensor_offset = address;
  } else if (call.plan->may_single_copy()) {
    call.address = address;
  }
  return call;
}

}  // namespace

void bind_simulated_world(py::module_& module) {
  module.def(
      "run_simulated",
      [](int ranks, std::uint64_t seed, std::uint32_t max_boxes, std::size_t slot_bytes, double delay, int crash_rank,
         std::uint64_t crash_after, std::int64_t flip_box, const std::vector<std::vector<SimulatedCall>>& calls) {
        SimulationOptions options;
        options.ranks = ranks;
        options.seed = seed;
        options.max_boxes = max_boxes;
        options.slot_bytes = slot_bytes;
        options.delay = delay;
        options.crash_rank = crash_rank;
        options.crash_after = crash_after;
        options.flip_box = flip_box;
        std::vector<std::vector<Call>> calls_of_ranks;
        for (const auto& calls_of_rank : calls) {
          calls_of_ranks.emplace_back();
          for (const SimulatedCall& call : calls_of_rank) calls_of_ranks.back().push_back(call_of(call));
        }
        const std::vector<SimulationOutcome> outcomes = without_gil([&] {
          SimulatedWorld world(options);
          return world.run(std::move(calls_of_ranks));
        });
        py::list result;
        for (const SimulationOutcome& outcome : outcomes) {
          result.append(py::make_tuple(static_cast<int>(outcome.kind), outcome.failed_rank, outcome.finished,
                                       outcome.wire_bytes, reports_of(outcome.choices)));
        }
        return result;
      },
      py::kw_only(), py::arg("ranks"), py::arg("seed"), py::arg("max_boxes"), py::arg("slot_bytes"), py::arg("delay"),
      py::arg("crash_rank"), py::arg("crash_after"), py::arg("flip_box"), py::arg("calls"),
      "Runs calls[rank] on every rank in one thread. Returns (kind, failed rank, operations finished, bytes sent, what "
      "its tuner has chosen) of every rank.");
}

}  // namespace dtcomm::python
