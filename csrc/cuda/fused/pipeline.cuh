// What the fused collectives are made of: runs of a tensor, slots in peers' rooms, calls that are set to a section, and
// the exchange of signals.
#pragma once

#include "cuda/combine_tile.cuh"
#include "cuda/fused/peer_memory.cuh"

namespace dtcomm::cuda {

// Elements of the input and of the output, on a grid of granules that begins with the first of them.
struct Run {
  std::uint64_t in, out, numel;
};

// What `rank` sums up of an all-reduced tensor: its granules cut evenly, as csrc/engine/plan.cpp cuts them.
DTCOMM_DEVICE Run chunk_of(const Fused& fused, int rank) {
  const auto ranks = static_cast<std::uint64_t>(fused.ranks);
  const std::uint64_t from = fused.granules * static_cast<std::uint64_t>(rank) / ranks * fused.granule_elements;
  const std::uint64_t to = fused.granules * static_cast<std::uint64_t>(rank + 1) / ranks * fused.granule_elements;
  return {from, from, (to < fused.numel ? to : fused.numel) - (from < fused.numel ? from : fused.numel)};
}

// The n-th section of a run; empty behind its end.
DTCOMM_DEVICE Run section_of(const Fused& fused, const Run& run, std::uint64_t index) {
  const std::uint64_t most = std::uint64_t{fused.section} * fused.granule_elements;
  const std::uint64_t from = index * most;
  const std::uint64_t left = from < run.numel ? run.numel - from : 0;
  return {run.in + from, run.out + from, left < most ? left : most};
}

// The slot of block `block` and rank `whose` in the n-th quarter of a room. It lies where it lies for every call.
DTCOMM_DEVICE std::uint8_t* slot(const Fused& fused, const Peer& peer, unsigned quarter, unsigned block, int whose) {
  const std::uint64_t at = (quarter * fused.stride + block) * static_cast<std::uint64_t>(fused.ranks);
  return peer.room + (at + static_cast<unsigned>(whose)) * fused.slot_bytes;
}

constexpr unsigned kInbox = 0, kOutbox = 1, kHalves = 2;

// The terms of a sum are what lies in a rank's own slots, in rank order, its own slot only where it is `own`.
DTCOMM_DEVICE void point_at_slots(const Fused& fused, int rank, unsigned quarter, unsigned block, bool own,
                                  Call& call) {
  int term = 0;
  DTCOMM_LOOP
  for (int r = 0; r < fused.ranks; ++r) {
    if (own || r != rank) call.near[term++] = slot(fused, fused.peers[rank], quarter, block, r);
  }
}

// What a call knows of the run that its tensors, set before, begin with.
DTCOMM_DEVICE void set_run(const Layout& layout, const Run& run, Call& call) {
  call.local_wide = aligned_to(call.local, kAlign);
  call.out_wide = aligned_to(call.out, kAlign);
  call.residual_wide = aligned_to(call.residual_in, kAlign) && aligned_to(call.residual_out, kAlign);
  call.offset += run.in;
  call.last = run.numel ? (run.numel - 1) >> call.granule_shift : 0;
  const std::uint64_t tail = run.numel - (call.last << call.granule_shift);
  call.tail = tail == call.whole.n ? call.whole : shape_of(layout, tail);
}

// Sets a copy of a seat's call to a run: everything but where payloads lie. The copy was made before; only what differs
// from section to section is written.
DTCOMM_DEVICE void aim(const Fused& fused, const Seat& seat, Verb verb, const Run& run, Call& call) {
  const Call& base = seat.calls[static_cast<unsigned>(verb)];
  const auto past = [&](const void* tensor, std::uint64_t elements) {
    return tensor ? static_cast<const std::uint8_t*>(tensor) + elements * fused.element_bytes : nullptr;
  };
  call.local = past(base.local, run.in);
  call.out = const_cast<std::uint8_t*>(past(base.out, run.out));
  call.residual_in = base.residual_in ? base.residual_in + run.in : nullptr;
  call.residual_out = base.residual_out ? base.residual_out + run.in : nullptr;
  call.offset = base.offset;
  set_run(fused.layout, run, call);
}

// All of a block's calls, a thread each: run_of(verb, peer) is the section that a call points at, and point(verb, peer,
// call) sets where its payloads lie. Of sums there is one, the first, and its peer is the rank itself.
template <class Block, class RunOf, class PointAt>
DTCOMM_DEVICE void aim_all(const Block& block, const Fused& fused, int rank, const RunOf& run_of,
                           const PointAt& point) {
  const auto verb = static_cast<Verb>(block.thread() / kMostRanks);
  const auto slot = static_cast<int>(block.thread() % kMostRanks);
  if (block.thread() >= kVerbs * kMostRanks || slot >= fused.ranks) return;
  const int peer = verb == Verb::reduce ? rank : slot;
  Call& call = block.shared().calls[static_cast<unsigned>(verb)][slot];
  aim(fused, fused.seats[rank - fused.first], verb, run_of(verb, peer), call);
  point(verb, peer, call);
}

DTCOMM_DEVICE std::uint64_t elements_of(const Call& call) { return (call.last << call.granule_shift) + call.tail.n; }

// So that a section's payload is copied whole.
DTCOMM_DEVICE std::uint64_t bytes_of(const Call& call) {
  return call.tail.n ? call.last * call.granule_bytes + call.tail.bytes : 0;
}

template <class Block>
DTCOMM_DEVICE std::uint64_t tiles_of(const Block& block, const Call& call) {
  const std::uint64_t of_tile = std::uint64_t{block.threads()} * kOctet;
  return (elements_of(call) + of_tile - 1) / of_tile;
}

template <int Count, bool Encodes, bool Feedback, class Family, class Block>
DTCOMM_DEVICE void every_tile(const Block& block, const Call& call, const Family& family) {
  const std::uint64_t tiles = tiles_of(block, call);
  DTCOMM_LOOP
  for (std::uint64_t tile = 0; tile < tiles; ++tile) combine_tile<Count, Encodes, Feedback>(block, call, family, tile);
}

// Bytes as they are, by sixteen where both sides allow it. Neither is read or written by others meanwhile.
template <class Block>
DTCOMM_DEVICE void move(const Block& block, const void* from, void* to, std::uint64_t bytes) {
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
DTCOMM_DEVICE void push(const Block& block, const Fused& fused, int rank, unsigned quarter, unsigned index,
                        const Call& call) {
  const std::uint8_t* from = slot(fused, fused.peers[rank], quarter, index, rank);
  const std::uint64_t bytes = bytes_of(call);
  for (std::uint64_t at = block.thread() * sizeof(Quad); at < bytes; at += block.threads() * sizeof(Quad)) {
    const Quad quad = load_quad(from + at);
    for (int k = 1; k < fused.ranks; ++k) {
      const int peer = (rank + k) % fused.ranks;
      store_quad(quad, slot(fused, fused.peers[peer], quarter, index, rank) + at);
    }
  }
}

// Tells every peer that this block has come so far, and waits until they have; false where one did not come.
template <class Block>
DTCOMM_DEVICE bool exchange(const Block& block, const Fused& fused, int rank, unsigned index, Stage stage,
                            std::uint32_t epoch, Point before, Point after) {
  block.meet(before);
  const auto at = static_cast<unsigned>(stage);
  const unsigned peer = block.thread();
  if (peer < static_cast<unsigned>(fused.ranks) && static_cast<int>(peer) != rank) {
    block.signal(&fused.peers[peer].pad->signals[at][index][rank], epoch);
    if (!block.wait(&fused.peers[rank].pad->signals[at][index][peer], epoch, fused.budget)) {
      block.note(&block.shared().missing, 1 + peer);
      block.note(&fused.peers[rank].pad->missing, 1 + peer);
    }
  }
  block.meet(after);
  return block.shared().missing == 0;
}

// By words: as one assignment it would be held in registers.
DTCOMM_DEVICE void copy_call(const Call& from, Call& to) {
  static_assert(sizeof(Call) % sizeof(Word64) == 0, "copied by words");
  const auto* source = reinterpret_cast<const Word64*>(&from);
  auto* target = reinterpret_cast<Word64*>(&to);
  DTCOMM_LOOP
  for (unsigned word = 0; word < sizeof(Call) / sizeof(Word64); ++word) target[word] = source[word];
}

// All calls point at a section. False where the rank has missed another one in a call before: that has counted no
// further, so a call that was queued behind it would give numbers to its signals that have been given, and write what
// somebody late still reads.
template <class Block>
DTCOMM_DEVICE bool aimed(const Block& block) {
  block.meet(Point::aimed);
  return block.shared().lost == 0;
}

// Where a block begins: its calls as the seat has them, and how far it has counted. Whoever copies a call aims it, too.
template <class Block>
DTCOMM_DEVICE std::uint32_t enter(const Block& block, const Fused& fused, int rank, unsigned index, Algorithm which) {
  const unsigned verb = block.thread() / kMostRanks, slot = block.thread() % kMostRanks;
  if (verb < kVerbs) copy_call(fused.seats[rank - fused.first].calls[verb], block.shared().calls[verb][slot]);
  if (block.thread() == 0) {
    block.shared().missing = 0;
    block.shared().lost = block.look(&fused.peers[rank].pad->missing);
  }
  return fused.peers[rank].pad->epoch[static_cast<unsigned>(which)][index];
}

// A block that had nothing to do has nothing to write, nor met to write it behind what the others read.
template <class Block>
DTCOMM_DEVICE void leave(const Block& block, const Fused& fused, int rank, unsigned index, Algorithm which,
                         std::uint32_t epoch) {
  if (block.thread() != 0 || index >= fused.sections) return;
  fused.peers[rank].pad->epoch[static_cast<unsigned>(which)][index] = epoch;
}

}  // namespace dtcomm::cuda
