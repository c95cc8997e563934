#include "tests/cuda_emulated/fused_check.h"

#include <cstdio>
#include <memory>

#include "tests/cuda_emulated/engine_reference.h"
#include "tests/cuda_emulated/kernel_cases.h"

namespace dtcomm::cuda_emulated {

using cuda::Algorithm;
using cuda::Collective;

namespace {

std::string at_rank(const char* what, std::size_t rank, unsigned call) {
  return std::string(what) + " of rank " + std::to_string(rank) + " in call " + std::to_string(call);
}

// Where the input and the output of a rank lie.
struct Place {
  std::uint8_t* input;
  std::uint8_t* output;
};

Place place_of(const Scenario& scenario, Tensors& rank, std::size_t r) {
  const std::size_t shard = scenario.spec.numel * size_of(scenario.spec.dtype) * r;
  if (!scenario.in_place) return {rank.input.data(), rank.output.data()};
  if (scenario.spec.collective == Collective::reduce_scatter) return {rank.input.data(), rank.input.data() + shard};
  if (scenario.spec.collective == Collective::all_gather) return {rank.output.data() + shard, rank.output.data()};
  return {rank.input.data(), rank.input.data()};
}

}  // namespace

const char* name_of(Collective collective) {
  const char* const names[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"};
  return names[static_cast<unsigned>(collective)];
}

Scenario make_scenario(Collective collective, const std::string& algorithm, int ranks) {
  Scenario scenario;
  scenario.algorithm = algorithm;
  scenario.spec.collective = collective;
  scenario.spec.algorithm = algorithm == "two_shot" ? Algorithm::two_shot : Algorithm::one_shot;
  scenario.spec.ranks = scenario.spec.local_ranks = scenario.spec.buffer_layout.ranks = ranks;
  scenario.spec.buffer_layout.blocks = 4;
  return scenario;
}

std::string difference(TestBench& bench, const Scenario& scenario, std::uint64_t order, const emulator::Fault& fault,
                       int absent) {
  cuda::FusedSpec spec = scenario.spec;
  const auto count = static_cast<std::size_t>(spec.ranks);
  const std::size_t size = size_of(spec.dtype);
  Bytes bias(scenario.features * size);
  fill(spec.dtype, scenario.seed / 9 * 9, scenario.features, bias.data());
  std::vector<Bytes> memory, residuals;
  for (std::size_t r = 0; r < count; ++r) {
    memory.emplace_back(cuda::memory_bytes(spec.buffer_layout));
    std::memset(memory.back().data(), 0, cuda::kPadBytes);
    spec.peers[r] = cuda::peer_at(memory.back().data());
    residuals.emplace_back(input_numel(spec, static_cast<int>(r)) * sizeof(float));
    std::memset(residuals.back().data(), 0, residuals.back().size());
  }
  // One plan for all calls, or two that differ in sections and blocks.
  std::vector<std::unique_ptr<cuda::FusedPlan>> plans;
  for (unsigned number = 0; number < (scenario.alternates_plans ? 2U : 1U); ++number) {
    cuda::FusedSpec variant = spec;
    if (scenario.alternates_plans) {
      variant.section = 1 + number % 2;
      variant.blocks = number % 2 ? scenario.spec.blocks : 1;
    }
    plans.push_back(std::make_unique<cuda::FusedPlan>(variant));
  }
  // All calls first, as they would be queued; residuals pass from one to the next.
  std::vector<Bytes> expected_residuals = residuals;
  std::vector<std::vector<Tensors>> emulated(scenario.calls), expected(scenario.calls);
  std::vector<emulator::EmulatedCall> calls(scenario.calls);
  for (unsigned number = 0; number < scenario.calls; ++number) {
    calls[number].plan = plans[number % plans.size()].get();
    calls[number].tensors.features = scenario.features;
    for (std::size_t r = 0; r < count; ++r) {
      const auto rank = static_cast<int>(r);
      const unsigned seed = scenario.seed + 9 * static_cast<unsigned>(r) + 1000 * number;
      const std::size_t in = input_numel(spec, rank), out = output_numel(spec, rank);
      for (auto* side : {&emulated[number], &expected[number]}) {
        side->push_back({Bytes(in * size), Bytes(out * size), Bytes(), Bytes(out * size)});
        fill(spec.dtype, seed + 5, out, side->back().addend.data());
      }
      const Place place = place_of(scenario, emulated[number][r], r);
      fill(spec.dtype, seed, in, place.input);
      std::memcpy(expected[number][r].input.data(), place.input, in * size);
      expected[number][r].residual = expected_residuals[r];
      calls[number].tensors.ranks[r] = {
          place.input, place.output, scenario.residual ? reinterpret_cast<float*>(residuals[r].data()) : nullptr,
          scenario.bias ? bias.data() : nullptr, scenario.addend ? emulated[number][r].addend.data() : nullptr};
    }
    if (scenario.bias || scenario.addend || spec.encodes_own) {
      run_on_kernels(scenario, expected[number], bias.data());
    } else {
      run_on_engine(bench.programs, scenario, expected[number]);
    }
    for (std::size_t r = 0; r < count; ++r) expected_residuals[r] = expected[number][r].residual;
  }
  if (bench.observer) {
    bench.observer->constant(bias.data(), bias.size());
    for (unsigned r = 0; r < count; ++r) {
      bench.observer->pushed(residuals[r].data(), residuals[r].size(), "residual", r);
      for (auto& call : emulated) {
        bench.observer->pushed(call[r].input.data(), call[r].input.size(), "input", r);
        bench.observer->pushed(call[r].output.data(), call[r].output.size(), "output", r);
        bench.observer->constant(call[r].addend.data(), call[r].addend.size());
      }
    }
  }
  const Status status = bench.emulator.launch(calls, order, absent, fault);
  if (!status.ok()) return "refused: " + status.message();
  for (std::size_t r = 0; r < count; ++r) {
    const auto missing_rank = static_cast<int>(spec.peers[r].pad->missing_rank) - 1;
    if (static_cast<int>(r) == absent) continue;
    if (missing_rank != absent)
      return "the missing rank at rank " + std::to_string(r) + " is " + std::to_string(missing_rank);
    if (absent >= 0) continue;
    if (scenario.residual && !(residuals[r] == expected_residuals[r]))
      return "the residual of rank " + std::to_string(r);
    bool whole = memory[r].guarded() && residuals[r].guarded();
    for (unsigned number = 0; number < scenario.calls; ++number) {
      Tensors& rank = emulated[number][r];
      Bytes& out = expected[number][r].output;
      if (std::memcmp(place_of(scenario, rank, r).output, out.data(), out.size()) != 0) {
        return at_rank("the output", r, number);
      }
      whole &= rank.output.guarded() && rank.input.guarded();
    }
    if (!whole) return "the memory around the tensors of rank " + std::to_string(r);
  }
  return "";
}

std::string describe(const Scenario& scenario) {
  const cuda::FusedSpec& spec = scenario.spec;
  char text[400];
  std::snprintf(
      text, sizeof text,
      "%s, %s, of %zu elements, dtype %d, %d ranks, %u blocks, sections of %u granules, divisor %zu, op %d, "
      "residual %d, in place %d, epilogue %d/%d of %zu, encodes own %d, rounds %d, splits %zu, calls %u%s, seed %u: ",
      name_of(spec.collective), scenario.algorithm.c_str(), spec.numel, static_cast<int>(spec.dtype), spec.ranks,
      spec.blocks, spec.section, spec.divisor, static_cast<int>(spec.op), scenario.residual, scenario.in_place,
      scenario.bias, scenario.addend, scenario.features, spec.encodes_own, spec.rounds_sum, spec.splits.size(),
      scenario.calls, scenario.alternates_plans ? " that vary" : "", scenario.seed);
  return text + describe(spec.codec);
}

}  // namespace dtcomm::cuda_emulated
