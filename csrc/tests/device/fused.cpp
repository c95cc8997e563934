#include "tests/device/fused.h"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "tests/device/cases.h"
#include "tests/device/expected.h"

namespace dtcomm::device_tests {

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

std::string differs(Bench& bench, const Trial& trial, std::uint64_t order, const cuda::Fault& fault, int absent) {
  cuda::FusedCall call = trial.call;
  const auto count = static_cast<std::size_t>(call.ranks);
  const std::size_t size = size_of(call.dtype);
  std::vector<Tensors> ours(count), theirs(count);
  std::vector<Bytes> memory;
  for (std::size_t r = 0; r < count; ++r) {
    const auto rank = static_cast<int>(r);
    const std::size_t in = inputs_of(call, rank), out = outputs_of(call, rank);
    for (Tensors* each : {&ours[r], &theirs[r]}) {
      *each = {Bytes(in * size), Bytes(out * size), Bytes(in * sizeof(float)), Bytes(out * size)};
      std::memset(each->residual.data(), 0, each->residual.size());
    }
    memory.emplace_back(cuda::memory_bytes(call.room));
    std::memset(memory.back().data(), 0, cuda::kPadBytes);
    call.peers[r] = cuda::peer_at(memory.back().data());
  }
  Bytes bias(call.features * size);
  fill(call.dtype, trial.seed / 9 * 9, call.features, bias.data());
  for (unsigned number = 0; number < trial.calls; ++number) {
    for (std::size_t r = 0; r < count; ++r) {
      const unsigned seed = trial.seed + 9 * static_cast<unsigned>(r) + 1000 * number;
      Tensors& rank = ours[r];
      const Place place = place_of(trial, rank, r);
      fill(call.dtype, seed, inputs_of(call, static_cast<int>(r)), place.input);
      std::memcpy(theirs[r].input.data(), place.input, inputs_of(call, static_cast<int>(r)) * size);
      fill(call.dtype, seed + 5, outputs_of(call, static_cast<int>(r)), rank.addend.data());
      theirs[r].addend = rank.addend;
      float* residual = trial.residual ? reinterpret_cast<float*>(rank.residual.data()) : nullptr;
      call.shares[r] = {place.input, place.output, residual, trial.bias ? bias.data() : nullptr,
                        trial.addend ? rank.addend.data() : nullptr};
    }
    if (trial.bias || trial.addend || call.encodes_own) {
      run_on_verbs(trial, theirs, bias.data());
    } else {
      run_on_engine(bench.programs, trial, theirs);
    }
    const std::string refused = bench.emulator.launch(call, order + number, absent, fault);
    if (!refused.empty()) return "refused: " + refused;
    for (std::size_t r = 0; r < count; ++r) {
      const auto missing = static_cast<int>(call.peers[r].pad->missing) - 1;
      if (static_cast<int>(r) == absent) continue;
      if (missing != absent) return at_rank("the missing rank", r, number) + " is " + std::to_string(missing);
      if (absent >= 0) continue;
      const Place place = place_of(trial, ours[r], r);
      if (std::memcmp(place.output, theirs[r].output.data(), theirs[r].output.size()) != 0) {
        return at_rank("the output", r, number);
      }
      if (trial.residual && !(ours[r].residual == theirs[r].residual)) return at_rank("the residual", r, number);
      Tensors& rank = ours[r];
      const bool whole = memory[r].guarded() && rank.output.guarded() && rank.input.guarded();
      if (!whole || !rank.residual.guarded()) return at_rank("the memory around what is", r, number);
    }
    if (absent >= 0) break;
  }
  return "";
}

std::string describe(const Trial& trial) {
  const cuda::FusedCall& call = trial.call;
  char text[400];
  std::snprintf(text, sizeof text,
                "%s, %s, of %zu elements, dtype %d, %d ranks, %u blocks, sections of %u granules, divisor %zu, op %d, "
                "residual %d, in place %d, epilogue %d/%d of %zu, encodes own %d, splits %zu, seed %u: ",
                name_of(call.collective), trial.algorithm.c_str(), call.numel, static_cast<int>(call.dtype), call.ranks,
                call.blocks, call.section, call.divisor, static_cast<int>(call.op), trial.residual, trial.in_place,
                trial.bias, trial.addend, call.features, call.encodes_own, call.splits.size(), trial.seed);
  return text + describe(call.codec);
}

}  // namespace dtcomm::device_tests
