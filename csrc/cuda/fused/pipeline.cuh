// The parts of fused collectives: ranges of tensors, slots in peer buffers, kernel parameters that are pointed at a
// section, and the exchange of signals.
#pragma once

#include "cuda/combine_tile.cuh"
#include "cuda/fused/peer_memory.cuh"

namespace dtcomm::cuda {

// A range of elements: its offsets in the input and the output, and its size. Its granules begin with its first
// element.
struct TensorRange {
  std::uint64_t in, out, numel;
};

// The chunk of an all-reduced tensor that `rank` sums: granules cut evenly, as core/chunk_layout.h cuts them.
DTCOMM_DEVICE TensorRange chunk_range_of(const FusedParams& fused, int rank) {
  const auto ranks = static_cast<std::uint64_t>(fused.ranks);
  const std::uint64_t from = fused.granules * static_cast<std::uint64_t>(rank) / ranks * fused.granule_elements;
  const std::uint64_t to = fused.granules * static_cast<std::uint64_t>(rank + 1) / ranks * fused.granule_elements;
  return {from, from, (to < fused.numel ? to : fused.numel) - (from < fused.numel ? from : fused.numel)};
}

// The most elements of a section.
DTCOMM_DEVICE std::uint64_t section_elements(const FusedParams& fused) {
  return std::uint64_t{fused.section} * fused.granule_elements;
}

// Section `index` of a range; empty past its end.
DTCOMM_DEVICE TensorRange section_range(const FusedParams& fused, const TensorRange& range, std::uint64_t index) {
  const std::uint64_t most = section_elements(fused);
  const std::uint64_t from = index * most;
  const std::uint64_t left = from < range.numel ? range.numel - from : 0;
  return {range.in + from, range.out + from, left < most ? left : most};
}

// The slot of block `block` and rank `whose` in a region of a peer buffer. Its place is the same for all calls.
DTCOMM_DEVICE std::uint8_t* slot(const FusedParams& fused, const PeerPointers& peer, unsigned region, unsigned block,
                                 int whose) {
  const std::uint64_t at = (region * fused.slot_stride + block) * static_cast<std::uint64_t>(fused.ranks);
  return peer.buffer + (at + static_cast<unsigned>(whose)) * fused.slot_bytes;
}

constexpr unsigned kInbox = 0, kOutbox = 1, kAlternating = 2;

// Makes the payloads in a rank's slots the terms of a sum, in rank order; its own payload only where `own`.
DTCOMM_DEVICE void set_slot_payloads(const FusedParams& fused, int rank, unsigned region, unsigned block, bool own,
                                     KernelParams& params) {
  int term = 0;
  DTCOMM_LOOP
  for (int r = 0; r < fused.ranks; ++r) {
    if (own || r != rank) params.payloads[term++] = slot(fused, fused.peers[rank], region, block, r);
  }
}

// Sets the parameters that follow from a range whose tensors have been set before.
DTCOMM_DEVICE void set_range(const Layout& layout, const TensorRange& range, KernelParams& params) {
  params.local_aligned = aligned_to(params.local, kAlign);
  params.out_aligned = aligned_to(params.out, kAlign);
  params.residual_aligned = aligned_to(params.residual_in, kAlign) && aligned_to(params.residual_out, kAlign);
  params.offset += range.in;
  params.last = range.numel ? (range.numel - 1) >> params.granule_shift : 0;
  const std::uint64_t tail = range.numel - (params.last << params.granule_shift);
  params.tail = tail == params.whole.n ? params.whole : granule_shape_of(layout, tail);
}

// Points a copy of a rank's parameters at a range, except for the addresses of payloads. Writes only what differs from
// section to section.
DTCOMM_DEVICE void set_pointers(const FusedParams& fused, const RankState& state, Pass pass, const TensorRange& range,
                                KernelParams& params) {
  const KernelParams& base = state.params[static_cast<unsigned>(pass)];
  const auto past = [&](const void* tensor, std::uint64_t elements) {
    return tensor ? static_cast<const std::uint8_t*>(tensor) + elements * fused.element_bytes : nullptr;
  };
  params.local = past(base.local, range.in);
  params.out = const_cast<std::uint8_t*>(past(base.out, range.out));
  params.residual_in = base.residual_in ? base.residual_in + range.in : nullptr;
  params.residual_out = base.residual_out ? base.residual_out + range.in : nullptr;
  params.offset = base.offset;
  set_range(fused.layout, range, params);
}

// Points all parameters of a block at a section, one thread for each: range_of(pass, peer) is the section, and
// set_payloads(pass, peer, params) sets the addresses of payloads. There is one sum, whose peer is the rank itself.
template <class Block, class RangeOf, class SetPayloads>
DTCOMM_DEVICE void set_all_pointers(const Block& block, const FusedParams& fused, int rank, const RangeOf& range_of,
                                    const SetPayloads& set_payloads) {
  const auto pass = static_cast<Pass>(block.thread() / kMaxRanks);
  const auto slot = static_cast<int>(block.thread() % kMaxRanks);
  if (block.thread() >= kPasses * kMaxRanks || slot >= fused.ranks) return;
  const int peer = pass == Pass::reduce ? rank : slot;
  KernelParams& params = block.shared().params[static_cast<unsigned>(pass)][slot];
  set_pointers(fused, fused.states[rank - fused.first_rank], pass, range_of(pass, peer), params);
  set_payloads(pass, peer, params);
}

DTCOMM_DEVICE std::uint64_t element_count(const KernelParams& params) {
  return (params.last << params.granule_shift) + params.tail.n;
}

// Bytes of a section's payload.
DTCOMM_DEVICE std::uint64_t payload_bytes(const KernelParams& params) {
  return params.tail.n ? params.last * params.granule_bytes + params.tail.bytes : 0;
}

// The lanes of a warp that works by itself, for codecs whose blocks a warp holds.
template <class Block>
struct SingleWarp {
  const Block& block;

  DTCOMM_DEVICE unsigned thread() const { return block.thread() % kWarp; }
  DTCOMM_DEVICE unsigned threads() const { return kWarp; }
  template <class T>
  DTCOMM_DEVICE T shuffle_xor(T value, unsigned reach) const {
    return block.shuffle_xor(value, reach);
  }
  DTCOMM_DEVICE void shuffle_xor_vec8(const float (&x)[kVec8], unsigned reach, float (&other)[kVec8]) const {
    block.shuffle_xor_vec8(x, reach, other);
  }
  DTCOMM_DEVICE void sync_warp() const { block.sync_warp(); }
};

template <class Block>
constexpr bool kManyPasses<SingleWarp<Block>> = true;

constexpr std::uint32_t kWarpElements = kWarp * kVec8;

template <class Block>
DTCOMM_DEVICE std::uint64_t tile_count(const Block& block, const KernelParams& params) {
  const std::uint64_t of_tile = std::uint64_t{block.threads()} * kVec8;
  return (element_count(params) + of_tile - 1) / of_tile;
}

// Combines `count` ranges of elements, params_of(0), params_of(1), ..., none of which is larger than `most` elements.
// The warps take turns over the parts of all ranges, so that short ones keep them all busy.
template <int Count, bool Encodes, bool Feedback, class Family, class Block, class ParamsOf>
DTCOMM_DEVICE void combine_ranges(const Block& block, unsigned count, std::uint64_t most, const Family& family,
                                  const ParamsOf& params_of) {
  const SingleWarp<Block> warp{block};
  const auto parts = static_cast<std::uint32_t>((most + kWarpElements - 1) / kWarpElements);
  if (parts == 0) return;
  const unsigned warps = block.threads() / kWarp;
  unsigned range = 0;
  DTCOMM_LOOP
  for (std::uint32_t part = block.thread() / kWarp;; part += warps) {
    for (; part >= parts; part -= parts) ++range;
    if (range >= count) return;
    const KernelParams& params = params_of(range);
    if (std::uint64_t{part} * kWarpElements < element_count(params))
      combine_tile<Count, Encodes, Feedback>(warp, params, family, part);
  }
}

template <int Count, bool Encodes, bool Feedback, class Family, class Block>
DTCOMM_DEVICE void combine_range(const Block& block, const KernelParams& params, const Family& family) {
  combine_ranges<Count, Encodes, Feedback>(block, 1, element_count(params), family,
                                           [&](unsigned) -> const KernelParams& { return params; });
}

// Copies bytes, sixteen at a time where both addresses allow it.
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

// Copies the elements that a pass works on.
template <class Block>
DTCOMM_DEVICE void copy_elements(const Block& block, const FusedParams& fused, const KernelParams& params,
                                 const void* from, void* to) {
  copy_bytes(block, from, to, element_count(params) * fused.element_bytes);
}

// Copies a section's payload from the own slot to the same slot of every peer.
template <class Block>
DTCOMM_DEVICE void push_to_peers(const Block& block, const FusedParams& fused, int rank, unsigned region,
                                 unsigned index, const KernelParams& params) {
  const std::uint8_t* from = slot(fused, fused.peers[rank], region, index, rank);
  const std::uint64_t bytes = payload_bytes(params);
  for (std::uint64_t at = block.thread() * sizeof(Quad); at < bytes; at += block.threads() * sizeof(Quad)) {
    const Quad quad = load_quad(from + at);
    for (int k = 1; k < fused.ranks; ++k) {
      const int peer = rank + k < fused.ranks ? rank + k : rank + k - fused.ranks;
      store_quad(quad, slot(fused, fused.peers[peer], region, index, rank) + at);
    }
  }
}

// Signals every peer that this block has reached a stage, and waits until they have reached it. False where a peer did
// not come. `before` orders what the block did before its signals, `after` what it does after the peers' signals.
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

// Copies word by word: one assignment would go through registers.
DTCOMM_DEVICE void copy_params(const KernelParams& from, KernelParams& to) {
  static_assert(sizeof(KernelParams) % sizeof(Word64) == 0, "copied by words");
  const auto* source = reinterpret_cast<const Word64*>(&from);
  auto* target = reinterpret_cast<Word64*>(&to);
  DTCOMM_LOOP
  for (unsigned word = 0; word < sizeof(KernelParams) / sizeof(Word64); ++word) target[word] = source[word];
}

// Waits until all parameters point at the section. False where the rank missed another rank in an earlier call: that
// call stopped counting, so a call behind it would repeat numbers of signals and overwrite what a late peer still
// reads.
template <class Block>
DTCOMM_DEVICE bool pointers_ready(const Block& block) {
  block.sync_block(BarrierId::pointers_set);
  return block.shared().missing_before == 0;
}

// Begins a block: copies its rank's parameters to shared memory and returns the block's epoch. The thread that copies
// parameters is the one that set_all_pointers() lets point them at sections.
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

// Ends a block: stores its epoch. A block without sections has passed no barrier behind which it could store one.
template <class Block>
DTCOMM_DEVICE void end_block(const Block& block, const FusedParams& fused, int rank, unsigned index, Algorithm which,
                             std::uint32_t epoch) {
  if (block.thread() != 0 || index >= fused.sections) return;
  fused.peers[rank].pad->epoch[static_cast<unsigned>(which)][index] = epoch;
}

}  // namespace dtcomm::cuda
