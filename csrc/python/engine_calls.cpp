#include "python/engine_calls.h"

#include <atomic>
#include <utility>

#include "cpu/kernels.h"

namespace py = pybind11;

namespace dtcomm::python {
namespace {

std::atomic<const Kernels*> engine_kernels{&best_kernels()};

const Kernels* current_kernels() {
  const Kernels* kernels = engine_kernels.load(std::memory_order_relaxed);
  if (!kernels)
    throw py::value_error(
        "kernels: the native engine cannot run the reference: force a native kernel, or DTCOMM_RUNTIME=process_group");
  return kernels;
}

}  // namespace

Pointers unpack(std::uintptr_t in, std::uintptr_t out, std::uintptr_t residual) {
  return {reinterpret_cast<const std::uint8_t*>(in), reinterpret_cast<std::uint8_t*>(out),
          reinterpret_cast<float*>(residual)};
}

std::vector<Pointers> unpack_all(const std::vector<PointerTuple>& tuples) {
  std::vector<Pointers> pointers;
  pointers.reserve(tuples.size());
  for (const auto& [in, out, residual] : tuples) pointers.push_back(unpack(in, out, residual));
  return pointers;
}

void add_steps(Call& call, const Steps& before, const Steps& after, std::uint64_t agreed) {
  for (const NativeTask& step : before) call.before.push_back(step.run);
  const Plan& plan = *call.plan;
  const bool tells =
      plan.geometry() == Geometry::whole && plan.segments().size() == 1 && plan.program().writes_chunks_once();
  for (const NativeTask& step : after) {
    // Steps run in order: once one waits for the end those behind it do, too.
    if (step.arrival.take && tells && !call.arrival.take && call.after.empty()) {
      call.arrival = step.arrival;
    } else {
      call.after.push_back(step.run);
    }
  }
  call.agreed = agreed;
}

Call make_call(std::shared_ptr<const Plan> plan, std::vector<Pointers> pointers, std::uint64_t seed) {
  if (pointers.size() != plan->segments().size()) throw py::value_error("pointers: one triple per segment of the plan");
  Call call;
  call.plan = std::move(plan);
  call.segments = std::move(pointers);
  call.seed = seed;
  call.kernels = current_kernels();
  return call;
}

void choose_engine_kernels(const std::string& name) {
  const Kernels* kernels = find_kernels(name.c_str());
  if (!kernels && name != "reference") throw py::value_error("no kernels named '" + name + "' run on this CPU");
  engine_kernels.store(kernels);
}

std::string engine_kernels_name() {
  const Kernels* kernels = engine_kernels.load(std::memory_order_relaxed);
  return kernels ? kernels->name : "reference";
}

}  // namespace dtcomm::python
