// Ranks of one process as Python sees them: the engine's machines in orders that a seed decides.
#include <utility>

#include "engine/simulated_world.h"
#include "python/bindings.h"
#include "python/engine_calls.h"

namespace py = pybind11;

namespace dtcomm::python {

void bind_local(py::module_& module) {
  module.def(
      "run_local",
      [](int ranks, std::uint64_t seed, std::uint32_t max_boxes, std::size_t slot_bytes, double delay, int victim,
         std::uint64_t death, std::int64_t flip,
         const std::vector<std::vector<std::tuple<std::shared_ptr<Plan>, std::vector<PointerTuple>, std::uint64_t, bool,
                                                  Steps, Steps, std::uint64_t>>>& calls) {
        LocalOptions options;
        options.ranks = ranks;
        options.seed = seed;
        options.max_boxes = max_boxes;
        options.slot_bytes = slot_bytes;
        options.delay = delay;
        options.victim = victim;
        options.death = death;
        options.flip = flip;
        std::vector<std::vector<Call>> parsed;
        for (const auto& list : calls) {
          parsed.emplace_back();
          for (const auto& [plan, pointers, call_seed, shared, before, after, agreed] : list) {
            Call call = make_call(plan, unpack_all(pointers), call_seed);
            add_steps(call, before, after, agreed);
            if (shared) {
              call.region = 0;
              call.region_offset = reinterpret_cast<std::uintptr_t>(call.segments[0].in);
            } else if (call.plan->pulls()) {
              call.address = reinterpret_cast<std::uintptr_t>(call.segments[0].in);
            }
            parsed.back().push_back(std::move(call));
          }
        }
        std::vector<LocalOutcome> outcomes;
        {
          const py::gil_scoped_release release;
          LocalWorld world(options);
          outcomes = world.run(std::move(parsed));
        }
        py::list result;
        for (const LocalOutcome& outcome : outcomes) {
          result.append(
              py::make_tuple(static_cast<int>(outcome.fate), outcome.culprit, outcome.finished, outcome.wire_bytes));
        }
        return result;
      },
      py::kw_only(), py::arg("ranks"), py::arg("seed"), py::arg("max_boxes"), py::arg("slot_bytes"), py::arg("delay"),
      py::arg("victim"), py::arg("death"), py::arg("flip"), py::arg("calls"));
}

}  // namespace dtcomm::python
