#include "tests/cuda_emulated/fused_scenarios.h"

#include "tests/cuda_emulated/kernel_cases.h"

namespace dtcomm::cuda_emulated {

using cuda::Collective;
using cuda::Point;

bool is_program(const Kind& kind) {
  return trial(kind.collective, kind.algorithm, 2).call.algorithm == cuda::Algorithm::program;
}

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {{Collective::all_reduce, "two_shot"},     {Collective::all_reduce, "one_shot"},
                                        {Collective::reduce_scatter, "one_shot"}, {Collective::all_gather, "one_shot"},
                                        {Collective::all_to_all, "one_shot"},     {Collective::all_reduce, "ring"},
                                        {Collective::all_reduce, "tree"},         {Collective::all_reduce, "halving"},
                                        {Collective::all_reduce, "double_tree"},  {Collective::reduce_scatter, "ring"},
                                        {Collective::all_gather, "ring"}};
  return all;
}

std::vector<Codec> first_tier() {
  std::vector<Codec> found;
  for (const Codec& codec : codecs()) {
    if (cuda::fusible(codec, DType::f32)) found.push_back(codec);
  }
  return found;
}

namespace {

bool is_cast(const Codec& codec) {
  return codec.family == Family::none || codec.family == Family::fp16 || codec.family == Family::bf16;
}

}  // namespace

Trial drawn(std::minstd_rand& random, const Codec& codec, const Kind& kind, int ranks) {
  const auto one_of = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const DType dtypes[] = {DType::f32, DType::f32, DType::f16, DType::bf16};
  const auto n = static_cast<std::size_t>(ranks);
  const std::size_t granule = granule_elements(codec);
  Trial which = trial(kind.collective, kind.algorithm, ranks);
  cuda::FusedCall& call = which.call;
  const bool whole = kind.collective == Collective::all_reduce, reduces = kind.collective <= Collective::reduce_scatter;
  call.codec = codec;
  call.dtype = dtypes[one_of(4)];
  call.numel = 1 + one_of(granule * (whole ? n + 2 : ranks < 4 ? 3 : 2));
  call.blocks = static_cast<unsigned>(1 + one_of(ranks < 4 ? 3 : 2));
  call.section = static_cast<std::uint32_t>(1 + one_of(2));
  call.divisor = reduces && one_of(2) ? n : 1;
  which.residual = one_of(2);
  which.in_place = kind.collective != Collective::all_to_all && one_of(2);
  which.calls = static_cast<unsigned>(1 + one_of(2));
  which.varies = which.calls > 1 && one_of(2);
  which.seed = static_cast<unsigned>(one_of(90000));
  if (kind.collective == Collective::all_to_all && kind.algorithm == std::string("one_shot") && one_of(2)) {
    for (std::size_t pair = 0; pair < n * n; ++pair) {
      call.splits.push_back(one_of(4) ? one_of(granule * 2) : 0);
    }
    call.splits[one_of(n * n)] += 1;
  }
  if (reduces && is_cast(codec) && !which.residual) {
    call.op = static_cast<ReduceOp>(one_of(3));
    if (call.op != ReduceOp::sum) call.divisor = 1;
  }
  if (whole && call.algorithm != cuda::Algorithm::program && one_of(4) == 0) {
    which.bias = one_of(2);
    which.addend = !which.bias || one_of(2);
    call.features = 1 + one_of(300);
    call.numel = (call.numel + call.features - 1) / call.features * call.features;
    call.encodes_own = call.algorithm == cuda::Algorithm::two_shot && !which.residual && one_of(2);
    call.rounds = one_of(2);
  }
  return which;
}

Trial small(const Kind& kind, int ranks) {
  Trial which = trial(kind.collective, kind.algorithm, ranks);
  which.call.codec.family = Family::integer;
  which.call.codec.bits = 8;
  which.call.codec.block = 32;
  which.call.section = 1;
  // Whole granules: lanes that see another section than their neighbours must not come to other exchanges, too.
  const bool cut = which.call.algorithm != cuda::Algorithm::one_shot && kind.collective == Collective::all_reduce;
  if (is_program(kind)) {
    which.varies = true;
    which.calls = 2;
  }
  which.call.numel = kGranule * (cut ? 3 * static_cast<unsigned>(ranks) : 3);
  return which;
}

std::vector<Point> points(const Kind& kind) {
  // The calls of a tree wait for each other by themselves.
  if (kind.algorithm == std::string("tree")) return {Point::aimed, Point::stored, Point::arrived};
  if (is_program(kind)) return {Point::aimed, Point::entered, Point::stored, Point::arrived};
  if (kind.collective == Collective::reduce_scatter || kind.collective == Collective::all_to_all) {
    return {Point::aimed, Point::stored, Point::arrived, Point::done};
  }
  if (std::string(kind.algorithm) == "one_shot") {
    return {Point::aimed, Point::reduced, Point::pushed, Point::gathered, Point::done};
  }
  return {Point::aimed, Point::stored, Point::arrived, Point::reduced, Point::pushed, Point::gathered, Point::done};
}

const char* name_of(Point point) {
  const char* const names[] = {"aimed", "stored", "arrived", "reduced", "pushed", "gathered", "entered", "done"};
  return names[static_cast<unsigned>(point)];
}

bool shows_its_kernel(const Kind& kind) {
  const std::string algorithm = kind.algorithm;
  const bool shown = kind.collective == Collective::all_reduce && (algorithm == "ring" || algorithm == "tree");
  return !is_program(kind) || shown;
}

}  // namespace dtcomm::cuda_emulated
