#include "tests/cuda_emulated/fused_scenarios.h"

namespace dtcomm::cuda_emulated {

using cuda::BarrierId;
using cuda::Collective;

const std::vector<Kind>& collective_kinds() {
  static const std::vector<Kind> all = {{Collective::all_reduce, "two_shot"},
                                        {Collective::all_reduce, "one_shot"},
                                        {Collective::reduce_scatter, "one_shot"},
                                        {Collective::all_gather, "one_shot"},
                                        {Collective::all_to_all, "one_shot"}};
  return all;
}

std::vector<Codec> first_tier(const std::vector<Codec>& codecs) {
  std::vector<Codec> fusible;
  for (const Codec& codec : codecs) {
    if (cuda::fusible(codec, DType::f32)) fusible.push_back(codec);
  }
  return fusible;
}

namespace {

bool is_cast(const Codec& codec) {
  return codec.family == Family::none || codec.family == Family::fp16 || codec.family == Family::bf16;
}

}  // namespace

Scenario random_scenario(std::minstd_rand& random, const Codec& codec, const Kind& kind, int ranks) {
  const auto one_of = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const DType dtypes[] = {DType::f32, DType::f32, DType::f16, DType::bf16};
  const auto n = static_cast<std::size_t>(ranks);
  const std::size_t granule = granule_elements(codec);
  Scenario scenario = make_scenario(kind.collective, kind.algorithm, ranks);
  cuda::FusedSpec& spec = scenario.spec;
  const bool whole = kind.collective == Collective::all_reduce, reduces = kind.collective <= Collective::reduce_scatter;
  spec.codec = codec;
  spec.dtype = dtypes[one_of(4)];
  spec.numel = 1 + one_of(granule * (whole ? n + 2 : ranks < 4 ? 3 : 2));
  spec.blocks = static_cast<unsigned>(1 + one_of(ranks < 4 ? 3 : 2));
  spec.section = static_cast<std::uint32_t>(1 + one_of(2));
  spec.divisor = reduces && one_of(2) ? n : 1;
  scenario.residual = one_of(2);
  scenario.in_place = kind.collective != Collective::all_to_all && one_of(2);
  scenario.calls = static_cast<unsigned>(1 + one_of(2));
  scenario.alternates_plans = scenario.calls > 1 && one_of(2);
  scenario.seed = static_cast<unsigned>(one_of(90000));
  if (kind.collective == Collective::all_to_all && one_of(2)) {
    for (std::size_t pair = 0; pair < n * n; ++pair) {
      spec.splits.push_back(one_of(4) ? one_of(granule * 2) : 0);
    }
    spec.splits[one_of(n * n)] += 1;
  }
  if (reduces && is_cast(codec) && !scenario.residual) {
    spec.op = static_cast<ReduceOp>(one_of(3));
    if (spec.op != ReduceOp::sum) spec.divisor = 1;
  }
  if (whole && one_of(4) == 0) {
    scenario.bias = one_of(2);
    scenario.addend = !scenario.bias || one_of(2);
    scenario.features = 1 + one_of(300);
    spec.numel = (spec.numel + scenario.features - 1) / scenario.features * scenario.features;
    spec.encodes_own = spec.algorithm == cuda::Algorithm::two_shot && !scenario.residual && one_of(2);
    spec.rounds_sum = one_of(2);
  }
  return scenario;
}

Scenario small_scenario(const Kind& kind, int ranks) {
  Scenario scenario = make_scenario(kind.collective, kind.algorithm, ranks);
  scenario.spec.codec.family = Family::integer;
  scenario.spec.codec.bits = 8;
  scenario.spec.codec.block = 32;
  scenario.spec.section = 1;
  // Whole granules: lanes that see another section than their neighbours must not come to other exchanges, too.
  const bool cut = scenario.spec.algorithm != cuda::Algorithm::one_shot && kind.collective == Collective::all_reduce;
  scenario.spec.numel = kGranule * (cut ? 3 * static_cast<unsigned>(ranks) : 3);
  return scenario;
}

std::vector<BarrierId> barriers_of(const Kind& kind) {
  if (kind.collective == Collective::reduce_scatter || kind.collective == Collective::all_to_all) {
    return {BarrierId::pointers_set, BarrierId::payloads_stored, BarrierId::payloads_arrived, BarrierId::section_done};
  }
  if (std::string(kind.algorithm) == "one_shot") {
    return {BarrierId::pointers_set, BarrierId::sum_encoded, BarrierId::payloads_pushed, BarrierId::payloads_gathered,
            BarrierId::section_done};
  }
  return {BarrierId::pointers_set,    BarrierId::payloads_stored,   BarrierId::payloads_arrived, BarrierId::sum_encoded,
          BarrierId::payloads_pushed, BarrierId::payloads_gathered, BarrierId::section_done};
}

const char* name_of(BarrierId barrier) {
  const char* const names[] = {"pointers_set",    "payloads_stored",   "payloads_arrived", "sum_encoded",
                               "payloads_pushed", "payloads_gathered", "section_done"};
  return names[static_cast<unsigned>(barrier)];
}

}  // namespace dtcomm::cuda_emulated
