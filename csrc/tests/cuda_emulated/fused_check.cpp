#include "tests/cuda_emulated/fused_check.h"

#include <cstdio>

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

Place place_of(const Trial& trial, Tensors& rank, std::size_t r) {
  const std::size_t shard = trial.call.numel * size_of(trial.call.dtype) * r;
  if (!trial.in_place) return {rank.input.data(), rank.output.data()};
  if (trial.call.collective == Collective::reduce_scatter) return {rank.input.data(), rank.input.data() + shard};
  if (trial.call.collective == Collective::all_gather) return {rank.output.data() + shard, rank.output.data()};
  return {rank.input.data(), rank.input.data()};
}

}  // namespace

const char* name_of(Collective collective) {
  const char* const names[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"};
  return names[static_cast<unsigned>(collective)];
}

Trial trial(Collective collective, const std::string& algorithm, int ranks) {
  Trial made;
  made.algorithm = algorithm;
  made.call.collective = collective;
  made.call.algorithm = algorithm == "two_shot"   ? Algorithm::two_shot
                        : algorithm == "one_shot" ? Algorithm::one_shot
                                                  : Algorithm::program;
  made.call.ranks = made.call.here = made.call.room.ranks = ranks;
  made.call.room.blocks = 4;
  return made;
}

std::string differs(Bench& bench, const Trial& trial, std::uint64_t order, const emulator::Fault& fault, int absent) {
  cuda::FusedCall call = trial.call;
  const auto count = static_cast<std::size_t>(call.ranks);
  const std::size_t size = size_of(call.dtype);
  if (call.algorithm == Algorithm::program) {
    const Lowering& lowering = bench.programs.of(name_of(call.collective), trial.algorithm, call.ranks);
    call.steps = lowering.steps;
    for (std::size_t r = 0; r < count; ++r) call.programs.push_back({*lowering.programs[r], lowering.step_of[r]});
    call.room.box_bytes = (cuda::box_bytes(call) + 15) / 16 * 16;
  }
  Bytes bias(call.features * size);
  fill(call.dtype, trial.seed / 9 * 9, call.features, bias.data());
  std::vector<Bytes> memory, residuals;
  for (std::size_t r = 0; r < count; ++r) {
    memory.emplace_back(cuda::memory_bytes(call.room));
    std::memset(memory.back().data(), 0, cuda::kPadBytes);
    call.peers[r] = cuda::peer_at(memory.back().data());
    residuals.emplace_back(inputs_of(call, static_cast<int>(r)) * sizeof(float));
    std::memset(residuals.back().data(), 0, residuals.back().size());
  }
  // All calls first, as they would be queued; residuals go from one to the next.
  std::vector<Bytes> kept = residuals;
  std::vector<std::vector<Tensors>> ours(trial.calls), theirs(trial.calls);
  std::vector<cuda::FusedCall> calls(trial.calls, call);
  for (unsigned number = 0; number < trial.calls; ++number) {
    for (std::size_t r = 0; r < count; ++r) {
      const auto rank = static_cast<int>(r);
      const unsigned seed = trial.seed + 9 * static_cast<unsigned>(r) + 1000 * number;
      const std::size_t in = inputs_of(call, rank), out = outputs_of(call, rank);
      for (auto* each : {&ours[number], &theirs[number]}) {
        each->push_back({Bytes(in * size), Bytes(out * size), Bytes(), Bytes(out * size)});
        fill(call.dtype, seed + 5, out, each->back().addend.data());
      }
      const Place place = place_of(trial, ours[number][r], r);
      fill(call.dtype, seed, in, place.input);
      std::memcpy(theirs[number][r].input.data(), place.input, in * size);
      theirs[number][r].residual = kept[r];
      calls[number].shares[r] = {
          place.input, place.output, trial.residual ? reinterpret_cast<float*>(residuals[r].data()) : nullptr,
          trial.bias ? bias.data() : nullptr, trial.addend ? ours[number][r].addend.data() : nullptr};
    }
    if (trial.bias || trial.addend || call.encodes_own) {
      run_on_verbs(trial, theirs[number], bias.data());
    } else {
      run_on_engine(bench.programs, trial, theirs[number]);
    }
    for (std::size_t r = 0; r < count; ++r) kept[r] = theirs[number][r].residual;
    if (trial.varies) {
      calls[number].section = 1 + number % 2;
      calls[number].blocks = number % 2 ? trial.call.blocks : 1;
    }
  }
  if (bench.observer) {
    bench.observer->constant(bias.data(), bias.size());
    for (unsigned r = 0; r < count; ++r) {
      bench.observer->shared(residuals[r].data(), residuals[r].size(), "residual", r);
      for (auto& each : ours) {
        bench.observer->shared(each[r].input.data(), each[r].input.size(), "input", r);
        bench.observer->shared(each[r].output.data(), each[r].output.size(), "output", r);
        bench.observer->constant(each[r].addend.data(), each[r].addend.size());
      }
    }
  }
  const std::string refused = bench.emulator.launch(calls, order, absent, fault);
  if (!refused.empty()) return "refused: " + refused;
  for (std::size_t r = 0; r < count; ++r) {
    const auto missing = static_cast<int>(call.peers[r].pad->missing) - 1;
    if (static_cast<int>(r) == absent) continue;
    if (missing != absent) return "the missing rank at rank " + std::to_string(r) + " is " + std::to_string(missing);
    if (absent >= 0) continue;
    if (trial.residual && !(residuals[r] == kept[r])) return "the residual of rank " + std::to_string(r);
    bool whole = memory[r].guarded() && residuals[r].guarded();
    for (unsigned number = 0; number < trial.calls; ++number) {
      Tensors& rank = ours[number][r];
      Bytes& out = theirs[number][r].output;
      if (std::memcmp(place_of(trial, rank, r).output, out.data(), out.size()) != 0) {
        return at_rank("the output", r, number);
      }
      whole &= rank.output.guarded() && rank.input.guarded();
    }
    if (!whole) return "the memory around what is of rank " + std::to_string(r);
  }
  return "";
}

std::string describe(const Trial& trial) {
  const cuda::FusedCall& call = trial.call;
  char text[400];
  std::snprintf(
      text, sizeof text,
      "%s, %s, of %zu elements, dtype %d, %d ranks, %u blocks, sections of %u granules, divisor %zu, op %d, "
      "residual %d, in place %d, epilogue %d/%d of %zu, encodes own %d, rounds %d, splits %zu, calls %u%s, seed %u: ",
      name_of(call.collective), trial.algorithm.c_str(), call.numel, static_cast<int>(call.dtype), call.ranks,
      call.blocks, call.section, call.divisor, static_cast<int>(call.op), trial.residual, trial.in_place, trial.bias,
      trial.addend, call.features, call.encodes_own, call.rounds, call.splits.size(), trial.calls,
      trial.varies ? " that vary" : "", trial.seed);
  return text + describe(call.codec);
}

}  // namespace dtcomm::cuda_emulated
