#include "cuda/fused/plan.h"

#include <algorithm>

namespace dtcomm::cuda {

namespace {

bool gathers(const FusedCall& call) {
  return call.collective == Collective::all_gather || call.collective == Collective::all_to_all;
}

bool has_residual(const FusedCall& call) {
  return std::any_of(call.shares, call.shares + call.here, [](const Share& share) { return share.residual; });
}

bool has_epilogue(const FusedCall& call) {
  return std::any_of(call.shares, call.shares + call.here,
                     [](const Share& share) { return share.bias || share.addend; });
}

bool verbatim(const FusedCall& call) {
  const bool moves = call.algorithm == Algorithm::program ? !sums(call) : gathers(call);
  return call.codec.family == Family::none && moves && !has_residual(call);
}

// Elements of a rank's input or output in an all_to_all of unequal shards.
std::size_t exchanged(const FusedCall& call, int rank, bool in) {
  const auto ranks = static_cast<std::size_t>(call.ranks), r = static_cast<std::size_t>(rank);
  std::size_t sum = 0;
  for (std::size_t peer = 0; peer < ranks; ++peer) sum += call.splits[in ? r * ranks + peer : peer * ranks + r];
  return sum;
}

Seat seat_of(const FusedCall& given, int rank, const Share& share) {
  static const std::uint8_t* const kLater[kMostRanks] = {};  // places of payloads are the kernel's business
  alignas(16) static std::uint8_t there[16];
  const bool two = given.collective == Collective::all_reduce && given.algorithm == Algorithm::two_shot;
  const bool owns = two || given.collective == Collective::reduce_scatter;
  const bool after = has_epilogue(given);
  const std::size_t numel = std::max<std::size_t>(given.numel, 1);
  Combine encode;
  encode.local = share.input;
  encode.numel = numel;
  encode.local_dtype = encode.out_dtype = encode.dtype = given.dtype;
  encode.residual_in = encode.residual_out = share.residual;
  encode.payload_out = there;
  Combine decode;
  decode.payloads = kLater;
  decode.count = 1;
  decode.numel = numel;
  decode.dtype = decode.out_dtype = given.dtype;
  decode.out = share.output;
  Combine reduce = owns && !given.encodes_own ? encode : decode;
  reduce.payloads = kLater;
  reduce.count = owns && !given.encodes_own ? given.ranks - 1 : given.ranks;
  reduce.op = given.op;
  reduce.divisor = given.divisor;
  reduce.out = two && after ? nullptr : share.output;
  reduce.payload_out = two ? there : nullptr;
  if (reduce.local) reduce.position = rank;
  return {{plan(given.codec, encode, nullptr), plan(given.codec, decode, nullptr), plan(given.codec, reduce, nullptr)},
          share.bias,
          share.addend};
}

std::string number(std::uint64_t value) { return std::to_string(value); }

std::string why_not_memory(const FusedCall& call) {
  const Room& room = call.room;
  if (room.ranks != call.ranks) return "room: is of " + number(room.ranks) + " ranks";
  if (room.blocks < 1 || room.blocks > kMostBlocks) return "room: blocks must be 1 to " + number(kMostBlocks);
  if (room.slot_bytes % kAlign || room.box_bytes % kAlign) return "room: bytes must be multiples of 16";
  if (call.blocks < 1 || call.blocks > room.blocks) return "blocks: must be 1 to the room's " + number(room.blocks);
  for (int rank = 0; rank < call.ranks; ++rank) {
    const Peer& peer = call.peers[rank];
    if (!peer.pad || !peer.room || !is_wide(peer.room)) return "peers: rank " + number(rank) + " has no aligned room";
  }
  return "";
}

std::string why_not_shares(const FusedCall& call) {
  const bool some_residual = has_residual(call);
  for (int i = 0; i < call.here; ++i) {
    const Share& share = call.shares[i];
    const int rank = call.first + i;
    const std::string whose = "shares: rank " + number(rank);
    const bool program = call.algorithm == Algorithm::program, uneven = !call.splits.empty();
    const bool reads = program ? reads_input(call, i) : !uneven || exchanged(call, rank, true);
    const bool writes = !program && (!uneven || exchanged(call, rank, false));
    if ((reads && !share.input) || (writes && !share.output)) return whose + " lacks a tensor";
    if (some_residual && !share.residual && !program) return whose + " has no residual, others do";
    if (share.bias && call.features == 0) return "features: must be the last dimension where there is a bias";
  }
  if (has_epilogue(call) && call.collective != Collective::all_reduce) return "shares: only all_reduce has an epilogue";
  if (has_epilogue(call) && call.algorithm == Algorithm::program) return "shares: a program has no epilogue";
  return "";
}

}  // namespace

std::uint64_t memory_bytes(const Room& room) {
  // Inbox and outbox of two_shot, and two halves of what has one signal: a slot for each block and rank.
  return kPadBytes + std::uint64_t{4} * room.blocks * static_cast<unsigned>(room.ranks) * room.slot_bytes +
         room.box_bytes;
}

bool fusible(const Codec& codec, DType dtype) {
  if (codec.family == Family::exact || is_sparse(codec) || exact_type(dtype)) return false;
  return with_family(codec, dtype, [](const auto& family) { return std::decay_t<decltype(family)>::kHot; });
}

std::uint32_t section_of(const FusedCall& call, const Layout& layout) {
  const std::uint64_t most = call.room.slot_bytes / layout.bytes(layout.granule);
  return static_cast<std::uint32_t>(call.section ? call.section : most);
}

std::string why_not(const FusedCall& call) {
  std::string reason = why_not_stated(call);
  return reason.empty() ? why_not_shares(call) : reason;
}

std::string why_not_stated(const FusedCall& call) {
  if (call.ranks < 2 || call.ranks > kMostRanks) return "ranks: must be 2 to " + number(kMostRanks);
  if (call.first < 0 || call.here < 1 || call.first + call.here > call.ranks) return "here: outside the ranks";
  if (!verbatim(call) && !fusible(call.codec, call.dtype))
    return "codec: there is no fused kernel for it and the dtype";
  if (call.op != ReduceOp::sum && !is_cast(call.codec)) return "op: min and max need none, fp16 or bf16";
  if (call.divisor < 1) return "divisor: must be at least 1";
  if (call.algorithm == Algorithm::two_shot && call.collective != Collective::all_reduce) {
    return "algorithm: two_shot is of all_reduce";
  }
  const auto pairs = static_cast<std::size_t>(call.ranks) * static_cast<std::size_t>(call.ranks);
  if (!call.splits.empty() && (call.collective != Collective::all_to_all || call.splits.size() != pairs)) {
    return "splits: one for each pair of ranks of an all_to_all";
  }
  if (call.encodes_own && (call.algorithm != Algorithm::two_shot || has_residual(call))) {
    return "encodes_own: is of two_shot, without a residual";
  }
  if (std::string reason = why_not_memory(call); !reason.empty()) return reason;
  if (call.algorithm == Algorithm::program) return why_no_steps(call);
  const Layout layout = layout_of(call.codec, call.dtype);
  const std::uint64_t section = section_of(call, layout);
  if (section < 1 || section * layout.bytes(layout.granule) > call.room.slot_bytes) {
    return "section: " + number(section) + " granules of " + number(layout.bytes(layout.granule)) +
           " bytes do not fit a slot of " + number(call.room.slot_bytes);
  }
  return "";
}

Call whole_call(const FusedCall& call, const Share& share) {
  alignas(16) static std::uint8_t there[16];
  Combine all;
  all.local = share.input;
  all.out = share.output;
  all.numel = std::max<std::size_t>(call.numel, 1);
  all.local_dtype = all.out_dtype = all.dtype = call.dtype;
  all.residual_in = all.residual_out = share.residual;
  all.op = call.op;
  all.payload_out = there;
  return plan(call.codec, all, nullptr);
}

Fused plan_fused(const FusedCall& call) {
  const Layout layout = layout_of(call.codec, call.dtype);
  Fused fused = {};
  fused.collective = call.collective;
  fused.algorithm = call.algorithm;
  fused.ranks = call.ranks;
  fused.first = call.first;
  fused.here = call.here;
  fused.blocks = call.blocks;
  fused.stride = call.room.blocks;
  fused.section = section_of(call, layout);
  fused.granules = (call.numel + layout.granule - 1) / layout.granule;
  fused.numel = call.numel;
  fused.slot_bytes = call.room.slot_bytes;
  fused.budget = call.budget;
  fused.features = std::max<std::uint64_t>(call.features, 1);
  fused.element_bytes = static_cast<std::uint32_t>(size_of(call.dtype));
  fused.granule_elements = static_cast<std::uint32_t>(layout.granule);
  fused.feedback = has_residual(call);
  fused.after = has_epilogue(call);
  fused.encodes_own = call.encodes_own;
  fused.rounds = call.rounds && call.dtype != DType::f32;
  fused.verbatim = verbatim(call);
  fused.uneven = !call.splits.empty();
  fused.layout = layout;
  std::copy(call.splits.begin(), call.splits.end(), fused.splits);
  std::copy(call.peers, call.peers + call.ranks, fused.peers);
  std::uint64_t largest = fused.granules;  // of a chunk
  if (fused.uneven) {
    const std::size_t most = *std::max_element(call.splits.begin(), call.splits.end());
    largest = (most + layout.granule - 1) / layout.granule;
  } else if (call.collective == Collective::all_reduce && call.algorithm == Algorithm::two_shot) {
    const auto ranks = static_cast<std::uint64_t>(call.ranks);
    largest = (largest + ranks - 1) / ranks;
  }
  fused.sections = static_cast<std::uint32_t>((largest + fused.section - 1) / fused.section);
  for (int i = 0; i < call.here; ++i) fused.seats[i] = seat_of(call, call.first + i, call.shares[i]);
  return fused;
}

}  // namespace dtcomm::cuda
