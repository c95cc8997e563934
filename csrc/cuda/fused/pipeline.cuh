// What the fused collectives are made of: runs of a tensor, slots in peers' rooms, calls that are set to a section, and
// the exchange of signals.
#pragma once

#include "cuda/combine_tile.cuh"
#include "cuda/fused/peer_memory.cuh"

namespace dtcomm::cuda {

// Elements of the input and of the output, on a grid of granules that begins with the first of them.
struct TensorRange {
  std::uint64_t in, out, numel;
};

// What `rank` sums up of an all-reduced tensor: its granules cut evenly, as csrc/engine/plan.cpp cuts them.
DTCOMM_DEVICE TensorRange chunk_range_of(const FusedParams& fused, int rank) {
  const auto ranks = static_cast<std::uint64_t>(fused.ranks);
  const std::uint64_t from = fused.granules * static_cast<std::uint64_t>(rank) / ranks * fused.granule_elements;
  const std::uint64_t to = fused.granules * static_cast<std::uint64_t>(rank + 1) / ranks * fused.granule_elements;
  return {from, from, (to < fused.numel ? to : fused.numel) - (from < fused.numel ? from : fused.numel)};
}

// The n-th section of a run; empty behind its end.
DTCOMM_DEVICE TensorRange section_range(const FusedParams& fused, const TensorRange& run, std::uint64_t index) {
  const std::uint64_t most = std::uint64_t{fused.section} * fused.granule_elements;
  const std::uint64_t from = index * most;
  const std::uint64_t left = from < run.numel ? run.numel - from : 0;
  return {run.in + from, run.out + from, left < most ? left : most};
}

// The slot of block `block` and rank `whose` in the n-th quarter of a room. It lies where it lies for every call.
DTCOMM_DEVICE std::uint8_t* slot(const FusedParams& fused, const PeerPointers& peer, unsigned region, unsigned block,
                                 int whose) {
  const std::uint64_t at = (region * fused.slot_stride + block) * static_cast<std::uint64_t>(fused.ranks);
  return peer.buffer + (at + static_cast<unsigned>(whose)) * fused.slot_bytes;
}

constexpr unsigned kInbox = 0, kOutbox = 1, kAlternating = 2;

// The terms of a sum are what lies in a rank's own slots, in rank order, its own slot only where it is `own`.
DTCOMM_DEVICE void set_slot_payloads(const FusedParams& fused, int rank, unsigned region, unsigned block, bool own,
                                     KernelParams& params) {
  int term = 0;
  DTCOMM_LOOP
  for (int r = 0; r < fused.ranks; ++r) {
    if (own || r != rank) params.payloads[term++] = slot(fused, fused.peers[rank], region, block, r);
  }
}

// What a call knows of the run that its tensors, set before, begin with.
DTCOMM_DEVICE void set_range(const Layout& layout, const TensorRange& run, KernelParams& params) {
  params.local_aligned = aligned_to(params.local, kAlign);
  params.out_aligned = aligned_to(params.out, kAlign);
  params.residual_aligned = aligned_to(params.residual_in, kAlign) && aligned_to(params.residual_out, kAlign);
  params.offset += run.in;
  params.last = run.numel ? (run.numel - 1) >> params.granule_shift : 0;
  const std::uint64_t tail = run.numel - (params.last << params.granule_shift);
  params.tail = tail == params.whole.n ? params.whole : granule_shape_of(layout, tail);
}

// Sets a copy of a seat's call to a run: everything but where payloads lie. The copy was made before; only what differs
// from section to section is written.
DTCOMM_DEVICE void set_pointers(const FusedParams& fused, const RankState& state, Pass pass, const TensorRange& run,
                                KernelParams& params) {
  const KernelParams& base = state.params[static_cast<unsigned>(pass)];
  const auto past = [&](const void* tensor, std::uint64_t elements) {
    return tensor ? static_cast<const std::uint8_t*>(tensor) + elements * fused.element_bytes : nullptr;
  };
  params.local = past(base.local, run.in);
  params.out = const_cast<std::uint8_t*>(past(base.out, run.out));
  params.residual_in = base.residual_in ? base.residual_in + run.in : nullptr;
  params.residual_out = base.residual_out ? base.residual_out + run.in : nullptr;
  params.offset = base.offset;
  set_range(fused.layout, run, params);
}

// All of a block's calls, a thread each: run_of(verb, peer) is the section that a call points at, and point(verb, peer,
// call) sets where its payloads lie. Of sums there is one, the first, and its peer is the rank itself.
template <class Block, class RunOf, class PointAt>
DTCOMM_DEVICE void set_all_pointers(const Block& block, const FusedParams& fused, int rank, const RunOf& run_of,
                                    const PointAt& point) {
  const auto pass = static_cast<Pass>(block.thread() / kMaxRanks);
  const auto slot = static_cast<int>(block.thread() % kMaxRanks);
  if (block.thread() >= kPasses * kMaxRanks || slot >= fused.ranks) return;
  const int peer = pass == Pass::reduce ? rank : slot;
  KernelParams& params = block.shared().params[static_cast<unsigned>(pass)][slot];
  set_pointers(fused, fused.states[rank - fused.first_rank], pass, run_of(pass, peer), params);
  point(pass, peer, params);
}

DTCOMM_DEVICE std::uint64_t element_count(const KernelParams& params) {
  return (params.last << params.granule_shift) + params.tail.n;
}

// So that a section's payload is copied whole.
DTCOMM_DEVICE std::uint64_t payload_bytes(const KernelParams& params) {
  return params.tail.n ? params.last * params.granule_bytes + params.tail.bytes : 0;
}

template <class Block>
DTCOMM_DEVICE std::uint64_t tile_count(const Block& block, const KernelParams& params) {
  const std::uint64_t of_tile = std::uint64_t{block.threads()} * kVec8;
  return (element_count(params) + of_tile - 1) / of_tile;
}

template <int Count, bool Encodes, bool Feedback, class Family, class Block>
DTCOMM_DEVICE void combine_tiles(const Block& block, const KernelParams& params, const Family& family) {
  const std::uint64_t tiles = tile_count(block, params);
  DTCOMM_LOOP
  for (std::uint64_t tile = 0; tile < tiles; ++tile)
    combine_tile<Count, Encodes, Feedback>(block, params, family, tile);
}

// Bytes as they are, by sixteen where both sides allow it. Neither is read or written by others meanwhile.
template <class Block>
DTCOMM_DEVICE void copy_bytes(const Block& block, const void* from, void* to, std::uint64_t bytes) {
  if (from == to) return;
  const auto* source = static_cast<const std::uint8_t*>(from);
  auto* target = static_cast<std::uint8_t*>(to);
  std::uint64_t quads = 0;
  if (aligned_to(from, sizeof(Quad)) && aligned_to(to, sizeof(Quad))) {
    quads = bytes / sizeof(Quad) * sizeof(Quad);
    for (std::uint64_t at = block.thread() * sizeof(Quad); at < quads; at += block.threads() * sizeof(Quad)) {
      store_quad(load_quad(source + at), target + at);
    }
  }
  for (std::uint64_t at = quads + block.thread(); at < bytes; at += block.threads()) target[at] = source[at];
}

// A section's payload to the same slot of every peer.
template <class Block>
DTCOMM_DEVICE void push_to_peers(const Block& block, const FusedParams& fused, int rank, unsigned region,
                                 unsigned index, const KernelParams& params) {
  const std::uint8_t* from = slot(fused, fused.peers[rank], region, index, rank);
  const std::uint64_t bytes = payload_bytes(params);
  for (std::uint64_t at = block.thread() * sizeof(Quad); at < bytes; at += block.threads() * sizeof(Quad)) {
    const Quad quad = load_quad(from + at);
    for (int k = 1; k < fused.ranks; ++k) {
      const int peer = (rank + k) % fused.ranks;
      store_quad(quad, slot(fused, fused.peers[peer], region, index, rank) + at);
    }
  }
}

// Tells every peer that this block has come so far, and waits until they have; false where one did not come.
template <class Block>
DTCOMM_DEVICE bool exchange_signals(const Block& block, const FusedParams& fused, int rank, unsigned index,
                                    SignalStage stage, std::uint32_t epoch, BarrierId before, BarrierId after) {
  block.sync_block(before);
  const auto at = static_cast<unsigned>(stage);
  const unsigned peer = block.thread();
  if (peer < static_cast<unsigned>(fused.ranks) && static_cast<int>(peer) != rank) {
    block.signal(&fused.peers[peer].pad->signals[at][index][rank], epoch);
    if (!block.wait(&fused.peers[rank].pad->signals[at][index][peer], epoch, fused.timeout_ns)) {
      block.store_relaxed(&block.shared().missing_rank, 1 + peer);
      block.store_relaxed(&fused.peers[rank].pad->missing_rank, 1 + peer);
    }
  }
  block.sync_block(after);
  return block.shared().missing_rank == 0;
}

// By words: as one assignment it would be held in registers.
DTCOMM_DEVICE void copy_params(const KernelParams& from, KernelParams& to) {
  static_assert(sizeof(KernelParams) % sizeof(Word64) == 0, "copied by words");
  const auto* source = reinterpret_cast<const Word64*>(&from);
  auto* target = reinterpret_cast<Word64*>(&to);
  DTCOMM_LOOP
  for (unsigned word = 0; word < sizeof(KernelParams) / sizeof(Word64); ++word) target[word] = source[word];
}

// All calls point at a section. False where the rank has missed another one in a call before: that has counted no
// further, so a call that was queued behind it would give numbers to its signals that have been given, and write what
// somebody late still reads.
template <class Block>
DTCOMM_DEVICE bool pointers_ready(const Block& block) {
  block.sync_block(BarrierId::pointers_set);
  return block.shared().missing_before == 0;
}

// Where a block begins: its calls as the seat has them, and how far it has counted. Whoever copies a call aims it, too.
template <class Block>
DTCOMM_DEVICE std::uint32_t begin_block(const Block& block, const FusedParams& fused, int rank, unsigned index,
                                        Algorithm which) {
  const unsigned pass = block.thread() / kMaxRanks, slot = block.thread() % kMaxRanks;
  if (pass < kPasses)
    copy_params(fused.states[rank - fused.first_rank].params[pass], block.shared().params[pass][slot]);
  if (block.thread() == 0) {
    block.shared().missing_rank = 0;
    block.shared().missing_before = block.load_acquire(&fused.peers[rank].pad->missing_rank);
  }
  return fused.peers[rank].pad->epoch[static_cast<unsigned>(which)][index];
}

// A block that had nothing to do has nothing to write, nor met to write it behind what the others read.
template <class Block>
DTCOMM_DEVICE void end_block(const Block& block, const FusedParams& fused, int rank, unsigned index, Algorithm which,
                             std::uint32_t epoch) {
  if (block.thread() != 0 || index >= fused.sections) return;
  fused.peers[rank].pad->epoch[static_cast<unsigned>(which)][index] = epoch;
}

}  // namespace dtcomm::cuda
