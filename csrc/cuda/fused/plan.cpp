#include "cuda/fused/plan.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace dtcomm::cuda {

namespace {

bool gathers(const FusedSpec& spec) {
  return spec.collective == Collective::all_gather || spec.collective == Collective::all_to_all;
}

template <class Has>
bool any_rank(const FusedSpec& spec, const LaunchTensors& tensors, const Has& has) {
  return std::any_of(tensors.ranks, tensors.ranks + spec.local_ranks, has);
}

bool has_residual(const FusedSpec& spec, const LaunchTensors& tensors) {
  return any_rank(spec, tensors, [](const RankTensors& rank) { return rank.residual != nullptr; });
}

bool has_epilogue(const FusedSpec& spec, const LaunchTensors& tensors) {
  return any_rank(spec, tensors, [](const RankTensors& rank) { return rank.bias || rank.addend; });
}

// Whether payloads are the elements' bytes, so that a tensor of any type will do.
bool verbatim(const FusedSpec& spec, bool residual) {
  return spec.codec.family == Family::none && gathers(spec) && !residual;
}

// Elements of a rank's input or output in an all_to_all of unequal shards.
std::size_t uneven_numel(const FusedSpec& spec, int rank, bool input) {
  const auto ranks = static_cast<std::size_t>(spec.ranks), r = static_cast<std::size_t>(rank);
  std::size_t sum = 0;
  for (std::size_t peer = 0; peer < ranks; ++peer) sum += spec.splits[input ? r * ranks + peer : peer * ranks + r];
  return sum;
}

RankState rank_state(const FusedSpec& spec, int rank, const RankTensors& tensors, bool epilogue) {
  static const std::uint8_t* const kNoPayloads[kMaxRanks] = {};  // kernels set the addresses of payloads themselves
  const bool two = spec.collective == Collective::all_reduce && spec.algorithm == Algorithm::two_shot;
  const bool adds_own = (two || spec.collective == Collective::reduce_scatter) && !spec.encodes_own;
  const std::size_t numel = std::max<std::size_t>(spec.numel, 1);
  Combine encode;
  encode.local = tensors.input;
  encode.numel = numel;
  encode.local_dtype = encode.out_dtype = encode.dtype = spec.dtype;
  encode.residual_in = encode.residual_out = tensors.residual;
  Combine decode;
  decode.payloads = kNoPayloads;
  decode.count = 1;
  decode.numel = numel;
  decode.dtype = decode.out_dtype = spec.dtype;
  decode.out = tensors.output;
  Combine reduce = adds_own ? encode : decode;
  reduce.payloads = kNoPayloads;
  reduce.count = adds_own ? spec.ranks - 1 : spec.ranks;
  reduce.op = spec.op;
  reduce.divisor = spec.divisor;
  reduce.out = two && epilogue ? nullptr : tensors.output;
  if (reduce.local) reduce.position = rank;
  return {{make_params(spec.codec, encode, nullptr, true), make_params(spec.codec, decode, nullptr, false),
           make_params(spec.codec, reduce, nullptr, two)},
          tensors.bias,
          tensors.addend};
}

std::string number(std::uint64_t value) { return std::to_string(value); }

Status check_memory(const FusedSpec& spec) {
  const PeerBufferLayout& layout = spec.buffer_layout;
  if (layout.ranks != spec.ranks) return Status::error("buffer_layout: is of " + number(layout.ranks) + " ranks");
  if (layout.blocks < 1 || layout.blocks > kMaxThreadBlocks)
    return Status::error("buffer_layout: blocks must be 1 to " + number(kMaxThreadBlocks));
  if (layout.slot_bytes % kAlign) return Status::error("buffer_layout: slot_bytes must be a multiple of 16");
  if (spec.blocks < 1 || spec.blocks > layout.blocks) {
    return Status::error("blocks: must be 1 to the buffer_layout's " + number(layout.blocks));
  }
  for (int rank = 0; rank < spec.ranks; ++rank) {
    const PeerPointers& peer = spec.peers[rank];
    if (!peer.pad || !peer.buffer || !is_aligned16(peer.buffer)) {
      return Status::error("peers: rank " + number(rank) + " has no aligned buffer");
    }
  }
  return Status();
}

// Granules of a chunk that a block takes at a time.
std::uint32_t section_granules(const FusedSpec& spec, const Layout& layout) {
  const std::uint64_t most = spec.buffer_layout.slot_bytes / layout.bytes(layout.granule);
  return static_cast<std::uint32_t>(spec.section ? spec.section : most);
}

constexpr const char* kNoCodec = "codec: there is no fused kernel for it and the dtype";

Status check_spec(const FusedSpec& spec) {
  if (spec.ranks < 2 || spec.ranks > kMaxRanks) return Status::error("ranks: must be 2 to " + number(kMaxRanks));
  if (spec.first_rank < 0 || spec.local_ranks < 1 || spec.first_rank + spec.local_ranks > spec.ranks) {
    return Status::error("local_ranks: outside the ranks");
  }
  if (!verbatim(spec, false) && !fusible(spec.codec, spec.dtype)) return Status::error(kNoCodec);
  if (spec.op != ReduceOp::sum && !is_cast(spec.codec)) return Status::error("op: min and max need none, fp16 or bf16");
  if (spec.divisor < 1) return Status::error("divisor: must be at least 1");
  if (spec.algorithm == Algorithm::two_shot && spec.collective != Collective::all_reduce) {
    return Status::error("algorithm: two_shot is of all_reduce");
  }
  const auto pairs = static_cast<std::size_t>(spec.ranks) * static_cast<std::size_t>(spec.ranks);
  if (!spec.splits.empty() && (spec.collective != Collective::all_to_all || spec.splits.size() != pairs)) {
    return Status::error("splits: one for each pair of ranks of an all_to_all");
  }
  if (spec.encodes_own && spec.algorithm != Algorithm::two_shot) return Status::error("encodes_own: is of two_shot");
  if (Status status = check_memory(spec); !status.ok()) return status;
  const Layout layout = layout_of(spec.codec, spec.dtype);
  const std::uint64_t section = section_granules(spec, layout);
  if (section < 1 || section * layout.bytes(layout.granule) > spec.buffer_layout.slot_bytes) {
    return Status::error("section: " + number(section) + " granules of " + number(layout.bytes(layout.granule)) +
                         " bytes do not fit a slot of " + number(spec.buffer_layout.slot_bytes));
  }
  return Status();
}

// A bit for each tensor that is present.
std::uint64_t presence_of(const FusedSpec& spec, const LaunchTensors& tensors) {
  std::uint64_t present = 0;
  for (int i = 0; i < spec.local_ranks; ++i) {
    const RankTensors& rank = tensors.ranks[i];
    for (const void* tensor : {rank.input, static_cast<const void*>(rank.output),
                               static_cast<const void*>(rank.residual), rank.bias, rank.addend}) {
      present = present << 1 | (tensor ? 1 : 0);
    }
  }
  return present;
}

// The parameters for tensors that are present as these are.
FusedParams make_fused_params(const FusedSpec& spec, const LaunchTensors& tensors) {
  const Layout layout = layout_of(spec.codec, spec.dtype);
  FusedParams params = {};
  params.collective = spec.collective;
  params.algorithm = spec.algorithm;
  params.ranks = spec.ranks;
  params.first_rank = spec.first_rank;
  params.local_ranks = spec.local_ranks;
  params.blocks = spec.blocks;
  params.slot_stride = spec.buffer_layout.blocks;
  params.section = section_granules(spec, layout);
  params.granules = (spec.numel + layout.granule - 1) / layout.granule;
  params.numel = spec.numel;
  params.slot_bytes = spec.buffer_layout.slot_bytes;
  params.timeout_ns = spec.timeout_ns;
  params.element_bytes = static_cast<std::uint32_t>(size_of(spec.dtype));
  params.granule_elements = static_cast<std::uint32_t>(layout.granule);
  params.has_epilogue = has_epilogue(spec, tensors);
  params.rounds_sum = spec.rounds_sum && spec.dtype != DType::f32;
  params.verbatim = verbatim(spec, has_residual(spec, tensors));
  params.uneven = !spec.splits.empty();
  const bool two = spec.algorithm == Algorithm::two_shot, to_all = spec.collective == Collective::all_to_all;
  params.scatters = two || to_all || spec.collective == Collective::reduce_scatter;
  params.sums_last = !two && !gathers(spec);
  params.keeps_own = to_all;
  const auto ranks_of = [&](bool own) { return static_cast<unsigned>(spec.ranks) - (own ? 0 : 1); };
  // The own part of a two_shot was written when it was summed, unless there is an epilogue.
  const bool sends_own = !params.scatters || spec.encodes_own, reads_own = !to_all && !(two && !params.has_epilogue);
  params.first_sent = sends_own ? 0 : 1;
  params.sent = params.scatters ? ranks_of(sends_own) : 1;
  params.first_received = reads_own ? 0 : 1;
  params.received = params.sums_last ? 1 : ranks_of(reads_own);
  params.layout = layout;
  std::copy(spec.splits.begin(), spec.splits.end(), params.splits);
  std::copy(spec.peers, spec.peers + spec.ranks, params.peers);
  std::uint64_t largest = params.granules;  // of a chunk
  if (params.uneven) {
    const std::size_t most = *std::max_element(spec.splits.begin(), spec.splits.end());
    largest = (most + layout.granule - 1) / layout.granule;
  } else if (spec.collective == Collective::all_reduce && spec.algorithm == Algorithm::two_shot) {
    const auto ranks = static_cast<std::uint64_t>(spec.ranks);
    largest = (largest + ranks - 1) / ranks;
  }
  params.sections = static_cast<std::uint32_t>((largest + params.section - 1) / params.section);
  params.largest_section =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(largest, params.section) * layout.granule);
  for (int i = 0; i < spec.local_ranks; ++i) {
    params.states[i] = rank_state(spec, spec.first_rank + i, tensors.ranks[i], params.has_epilogue);
  }
  return params;
}

// Replaces the addresses of tensors that a kernel uses. The kernel tests their alignment in each section.
void set_addresses(const RankTensors& tensors, KernelParams& params) {
  if (params.local) params.local = tensors.input;
  if (params.out) params.out = tensors.output;
  if (params.residual_in) params.residual_in = tensors.residual;
  if (params.residual_out) params.residual_out = tensors.residual;
}

}  // namespace

std::uint64_t memory_bytes(const PeerBufferLayout& layout) {
  // A slot for each block and rank in the inbox and the outbox of two_shot, and in the two alternating regions of the
  // algorithms with one signal a section.
  return kPadBytes + std::uint64_t{4} * layout.blocks * static_cast<unsigned>(layout.ranks) * layout.slot_bytes;
}

bool fusible(const Codec& codec, DType dtype) {
  return !is_native_sum_type(dtype) && with_fused_family(codec, dtype, [](const auto&) { return true; });
}

FusedPlan::FusedPlan(FusedSpec spec) : spec_(std::move(spec)) {
  throw_if_invalid(check_spec(spec_));
  for (int i = 0; i < spec_.local_ranks; ++i) {
    const bool uneven = !spec_.splits.empty();
    const int rank = spec_.first_rank + i;
    reads_input_[i] = !uneven || uneven_numel(spec_, rank, true) > 0;
    writes_output_[i] = !uneven || uneven_numel(spec_, rank, false) > 0;
  }
}

Status FusedPlan::check(const LaunchTensors& tensors) const {
  const bool residual = has_residual(spec_, tensors);
  for (int i = 0; i < spec_.local_ranks; ++i) {
    const RankTensors& rank = tensors.ranks[i];
    const std::string whose = "tensors: rank " + number(spec_.first_rank + i);
    if ((reads_input_[i] && !rank.input) || (writes_output_[i] && !rank.output))
      return Status::error(whose + " lacks a tensor");
    if (residual && !rank.residual) return Status::error(whose + " has no residual, others do");
    if (rank.bias && tensors.features == 0)
      return Status::error("features: must be the last dimension where there is a bias");
  }
  if (residual && verbatim(spec_, false) && !fusible(spec_.codec, spec_.dtype)) return Status::error(kNoCodec);
  if (residual && spec_.encodes_own) return Status::error("encodes_own: must be without a residual");
  if (!has_epilogue(spec_, tensors)) return Status();
  if (spec_.collective != Collective::all_reduce) return Status::error("tensors: only all_reduce has an epilogue");
  return Status();
}

const FusedParams& FusedPlan::prepare(const LaunchTensors& tensors) {
  const std::uint64_t present = presence_of(spec_, tensors);
  const auto same = [&](const auto& entry) { return entry->present == present; };
  auto found = std::find_if(prepared_.begin(), prepared_.end(), same);
  if (found == prepared_.end()) {
    found = prepared_.insert(found, std::make_unique<Prepared>(Prepared{present, make_fused_params(spec_, tensors)}));
  }
  FusedParams& params = (*found)->params;
  params.features = std::max<std::uint64_t>(tensors.features, 1);
  for (int i = 0; i < spec_.local_ranks; ++i) {
    const RankTensors& rank = tensors.ranks[i];
    for (KernelParams& pass : params.states[i].params) set_addresses(rank, pass);
    params.states[i].bias = rank.bias;
    params.states[i].addend = rank.addend;
  }
  return params;
}

}  // namespace dtcomm::cuda
