#include "tests/cuda_emulated/engine_reference.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "cpu/epilogue.h"
#include "engine/simulated_world.h"

namespace dtcomm::cuda_emulated {

using cuda::Collective;

namespace {

float* floats(Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); }

}  // namespace

std::size_t input_numel(const cuda::FusedSpec& call, int rank) {
  const auto ranks = static_cast<std::size_t>(call.ranks), r = static_cast<std::size_t>(rank);
  if (!call.splits.empty()) {
    const auto row = call.splits.begin() + static_cast<std::ptrdiff_t>(r * ranks);
    return std::accumulate(row, row + call.ranks, std::size_t{0});
  }
  const bool shards = call.collective == Collective::reduce_scatter || call.collective == Collective::all_to_all;
  return call.numel * (shards ? ranks : 1);
}

std::size_t output_numel(const cuda::FusedSpec& call, int rank) {
  const auto ranks = static_cast<std::size_t>(call.ranks), r = static_cast<std::size_t>(rank);
  if (!call.splits.empty()) {
    std::size_t sum = 0;
    for (std::size_t from = 0; from < ranks; ++from) sum += call.splits[from * ranks + r];
    return sum;
  }
  const bool gathers = call.collective == Collective::all_gather || call.collective == Collective::all_to_all;
  return call.numel * (gathers ? ranks : 1);
}

void run_on_engine(const Programs& programs, const Scenario& scenario, std::vector<Tensors>& ranks) {
  const cuda::FusedSpec& shape = scenario.spec;
  const RankPrograms& own = programs.of(name_of(shape.collective), scenario.algorithm, shape.ranks);
  PlanSpec spec;
  const Geometry geometries[] = {Geometry::whole, Geometry::scatter, Geometry::gather, Geometry::exchange};
  spec.geometry = geometries[static_cast<unsigned>(shape.collective)];
  spec.op = shape.op;
  spec.average = shape.divisor != 1;
  spec.variants.piece_bytes = 32 << 10;
  spec.slot_bytes = 256 << 10;
  spec.splits = shape.splits;
  const std::size_t most =
      shape.splits.empty() ? shape.numel : *std::max_element(shape.splits.begin(), shape.splits.end());
  spec.segments = {{most, shape.dtype, shape.codec, shape.codec}};
  std::vector<std::vector<dtcomm::Call>> calls(ranks.size());
  SimulationOptions world;
  world.ranks = shape.ranks;
  world.seed = scenario.seed;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    spec.program = own[r];
    auto plan = std::make_shared<const Plan>(spec);
    world.max_boxes = std::max(world.max_boxes, static_cast<std::uint32_t>(plan->max_boxes()));
    world.slot_bytes = std::max(world.slot_bytes, plan->box_stride() * static_cast<std::size_t>(plan->max_boxes()));
    dtcomm::Call call;
    call.plan = plan;
    call.kernels = find_kernels("generic");
    call.tensors = {
        {ranks[r].input.data(), ranks[r].output.data(), scenario.residual ? floats(ranks[r].residual) : nullptr}};
    calls[r].push_back(std::move(call));
  }
  for (const SimulationOutcome& outcome : SimulatedWorld(world).run(std::move(calls))) {
    if (outcome.kind != OutcomeKind::done) throw std::runtime_error("the engine did not finish: " + describe(scenario));
  }
}

void run_on_kernels(const Scenario& scenario, std::vector<Tensors>& ranks, const std::uint8_t* bias) {
  const cuda::FusedSpec& shape = scenario.spec;
  const Kernels& cpu = *find_kernels("generic");
  const std::size_t unit = granule_elements(shape.codec), numel = shape.numel, n = ranks.size();
  const std::size_t granules = (numel + unit - 1) / unit, size = size_of(shape.dtype);
  const bool two = shape.algorithm == cuda::Algorithm::two_shot;
  std::vector<Bytes> sums;  // payloads, or of one shot the fp32 sum
  std::vector<dtcomm::PayloadRun> runs;
  for (std::size_t c = 0; c < (two ? n : 1); ++c) {
    const std::size_t from = two ? std::min(numel, granules * c / n * unit) : 0;
    const std::size_t to = two ? std::min(numel, granules * (c + 1) / n * unit) : numel;
    if (from == to) continue;
    const std::size_t bytes = wire_bytes(shape.codec, to - from, shape.dtype);
    std::vector<Bytes> payloads;
    std::vector<const std::uint8_t*> terms;
    Combine sum;
    for (std::size_t r = 0; r < n; ++r) {
      Combine encode;
      encode.local = ranks[r].input.data() + from * size;
      encode.local_dtype = encode.out_dtype = encode.dtype = shape.dtype;
      encode.numel = to - from;
      if (scenario.residual) encode.residual_in = encode.residual_out = floats(ranks[r].residual) + from;
      if (two && r == c && !shape.encodes_own) {
        sum = encode;
        sum.position = static_cast<int>(r);
        continue;
      }
      payloads.emplace_back(bytes);
      encode.payload_out = payloads.back().data();
      cpu.combine(shape.codec, encode);
    }
    for (Bytes& payload : payloads) terms.push_back(payload.data());
    sum.payloads = terms.data();
    sum.count = static_cast<int>(terms.size());
    sum.numel = to - from;
    sum.dtype = sum.out_dtype = shape.dtype;
    sum.divisor = shape.divisor;
    sum.op = shape.op;
    sums.emplace_back(two ? bytes : numel * sizeof(float));
    if (two) {
      sum.payload_out = sums.back().data();
    } else {
      sum.out = sums.back().data();
      sum.out_dtype = DType::f32;
    }
    cpu.combine(shape.codec, sum);
    runs.push_back({nullptr, to - from});
  }
  for (std::size_t i = 0; i < runs.size(); ++i) runs[i].payload = sums[i].data();
  for (std::size_t r = 0; r < n; ++r) {
    Epilogue after;
    after.features = scenario.features;
    after.dtype = shape.dtype;
    after.bias = scenario.bias ? bias : nullptr;
    after.addend = scenario.addend ? ranks[r].addend.data() : nullptr;
    after.out = ranks[r].output.data();
    if (two && shape.rounds_sum) {
      Bytes rounded(wire_bytes(Codec{}, numel, shape.dtype));
      Epilogue sum = after;
      sum.bias = sum.addend = nullptr;
      sum.out = rounded.data();
      epilogue(cpu, shape.codec, runs, sum);
      epilogue(cpu, Codec{}, {{rounded.data(), numel}}, after);
    } else if (two) {
      epilogue(cpu, shape.codec, runs, after);
    } else {  // a sum that no payload holds: the same by hand
      std::vector<float> row(numel), other(numel);
      std::memcpy(row.data(), sums[0].data(), numel * sizeof(float));
      const auto add = [&](const std::uint8_t* tensor, std::size_t period) {
        cpu.decode(Codec{}, tensor, period, shape.dtype, other.data(), DType::f32, false);
        for (std::size_t i = 0; i < numel; ++i) row[i] += other[i % period];
      };
      if (shape.rounds_sum) {
        Bytes rounded(numel * size);
        Combine narrow;
        narrow.local = row.data();
        narrow.numel = numel;
        narrow.out = rounded.data();
        narrow.dtype = narrow.out_dtype = shape.dtype;
        cpu.combine(Codec{}, narrow);
        cpu.decode(Codec{}, rounded.data(), numel, shape.dtype, row.data(), DType::f32, false);
      }
      if (scenario.bias) add(bias, scenario.features);
      if (scenario.addend) add(ranks[r].addend.data(), numel);
      Combine round;
      round.local = row.data();
      round.numel = numel;
      round.out = after.out;
      round.dtype = round.out_dtype = shape.dtype;
      for (float& x : row) x = canonical(x);
      cpu.combine(Codec{}, round);
    }
  }
}

}  // namespace dtcomm::cuda_emulated
