// All-reduce in one launch over memory that peers write into: the direct algorithms (two_shot, one_shot) with any codec
// of the first tier. Payloads are stored where the receiver reads them; sums are in rank order and a sum is encoded
// once by its owner, whose own contribution is not encoded, so the bytes are those of csrc/engine's programs.
//
// Why a slot may be written again. two_shot: a block writes a peer's inbox of its next section after that peer has said
// `gathered` for this one, which it does when its sum is made; and its outbox after the peer has said `scattered` for
// the next section, which it does when it has decoded this one. one_shot has one signal a section, so slots take turns:
// the other half is written meanwhile, and this one only after the peer's signal for that.
#pragma once

#include "cuda/peers.cuh"
#include "cuda/tile.cuh"

namespace dtcomm::cuda {

// Granules [from, to) of the tensor.
struct Slice {
  std::uint64_t from, to;
};

// Section `index` of what `rank` sums up: of the tensor's granules cut evenly, as csrc/engine/plan.cpp cuts them.
DTCOMM_DEVICE Slice slice_of(const Fused& fused, int rank, std::uint64_t index) {
  const auto ranks = static_cast<std::uint64_t>(fused.ranks);
  const std::uint64_t begin = fused.granules * static_cast<std::uint64_t>(rank) / ranks;
  const std::uint64_t end = fused.granules * static_cast<std::uint64_t>(rank + 1) / ranks;
  const std::uint64_t from = begin + index * fused.section, to = from + fused.section;
  return {from < end ? from : end, to < end ? to : end};
}

DTCOMM_DEVICE Slice whole_of(const Fused& fused, std::uint64_t index) {
  const std::uint64_t from = index * fused.section, to = from + fused.section;
  return {from < fused.granules ? from : fused.granules, to < fused.granules ? to : fused.granules};
}

// The slot of block `block` and rank `whose` in the n-th quarter of a room.
DTCOMM_DEVICE std::uint8_t* slot(const Fused& fused, const Peer& peer, unsigned quarter, unsigned block, int whose) {
  const std::uint64_t at = (quarter * fused.blocks + block) * static_cast<std::uint64_t>(fused.ranks);
  return peer.room + (at + static_cast<unsigned>(whose)) * fused.slot_bytes;
}

constexpr unsigned kInbox = 0, kOutbox = 1, kHalves = 2;

// Sets a copy of a seat's call to a slice: everything but where payloads lie. The copy was made before; only what
// differs from section to section is written.
DTCOMM_DEVICE void aim(const Fused& fused, const Call& base, const Slice& slice, Call& call) {
  const std::uint64_t first = slice.from * fused.granule_elements;
  const auto past = [&](const void* tensor) {
    return tensor ? static_cast<const std::uint8_t*>(tensor) + first * fused.element_bytes : nullptr;
  };
  call.local = past(base.local);
  call.out = const_cast<std::uint8_t*>(past(base.out));
  call.residual_in = base.residual_in ? base.residual_in + first : nullptr;
  call.residual_out = base.residual_out ? base.residual_out + first : nullptr;
  call.offset = base.offset + first;
  call.last = slice.to > slice.from ? slice.to - slice.from - 1 : 0;
  call.tail = slice.to == fused.granules ? base.tail : base.whole;
}

DTCOMM_DEVICE std::uint64_t elements_of(const Call& call) { return (call.last << call.granule_shift) + call.tail.n; }

template <int Count, bool Encodes, bool Feedback, class Family, class Block>
DTCOMM_DEVICE void every_tile(const Block& block, const Slice& slice, const Call& call, const Family& family) {
  if (slice.from == slice.to) return;
  const std::uint64_t of_tile = std::uint64_t{block.threads()} * kOctet;
  const std::uint64_t tiles = (elements_of(call) + of_tile - 1) / of_tile;
  DTCOMM_LOOP
  for (std::uint64_t tile = 0; tile < tiles; ++tile) combine_tile<Count, Encodes, Feedback>(block, call, family, tile);
}

// The payload of a slice to the same slot of every peer.
template <class Block>
DTCOMM_DEVICE void push(const Block& block, const Fused& fused, int rank, unsigned quarter, unsigned index,
                        const Slice& slice, const Call& call) {
  if (slice.from == slice.to) return;
  const std::uint8_t* from = slot(fused, fused.peers[rank], quarter, index, rank);
  const std::uint64_t bytes = call.last * call.granule_bytes + call.tail.bytes;
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
      block.shared().missing = 1 + peer;
      fused.peers[rank].pad->missing = 1 + peer;
    }
  }
  block.meet(after);
  return block.shared().missing == 0;
}

// Where a block begins: its calls as the seat has them, and how far it has counted. Whoever copies a call aims it, too.
template <class Block>
DTCOMM_DEVICE std::uint32_t enter(const Block& block, const Fused& fused, int rank, unsigned index, Algorithm which) {
  Shared& shared = block.shared();
  const Seat& seat = fused.seats[rank - fused.first];
  const unsigned thread = block.thread();
  if (thread < static_cast<unsigned>(fused.ranks)) {
    shared.encode[thread] = seat.encode;
    shared.decode[thread] = seat.decode;
    if (static_cast<int>(thread) == rank) shared.reduce = seat.reduce;
  }
  if (thread == 0) shared.missing = 0;
  return fused.peers[rank].pad->epoch[static_cast<unsigned>(which)][index];
}

template <class Block>
DTCOMM_DEVICE void leave(const Block& block, const Fused& fused, int rank, unsigned index, Algorithm which,
                         std::uint32_t epoch) {
  if (block.thread() == 0) fused.peers[rank].pad->epoch[static_cast<unsigned>(which)][index] = epoch;
}

// Thread block `index` of a rank. `Count` is ranks - 1 where that is known, else kAnyCount; `Feedback`: residuals.
template <int Count, bool Feedback, class Family, class Block>
DTCOMM_DEVICE void two_shot(const Block& block, const Fused& fused, const Family& family, int rank, unsigned index) {
  Shared& shared = block.shared();
  const Seat& seat = fused.seats[rank - fused.first];
  std::uint32_t epoch = enter(block, fused, rank, index, Algorithm::two_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    const Slice mine = slice_of(fused, rank, section);
    if (block.thread() < static_cast<unsigned>(fused.ranks)) {
      const auto peer = static_cast<int>(block.thread());
      const Slice theirs = slice_of(fused, peer, section);
      if (peer == rank) {
        aim(fused, seat.reduce, mine, shared.reduce);
        int term = 0;
        for (int r = 0; r < fused.ranks; ++r) {
          if (r != rank) shared.reduce.near[term++] = slot(fused, fused.peers[rank], kInbox, index, r);
        }
        shared.reduce.payload_out = slot(fused, fused.peers[rank], kOutbox, index, rank);
      } else {
        aim(fused, seat.encode, theirs, shared.encode[peer]);
        shared.encode[peer].payload_out = slot(fused, fused.peers[peer], kInbox, index, rank);
        aim(fused, seat.decode, theirs, shared.decode[peer]);
        shared.decode[peer].near[0] = slot(fused, fused.peers[rank], kOutbox, index, peer);
      }
    }
    block.meet(Point::aimed);
    for (int k = 1; k < fused.ranks; ++k) {
      const int peer = (rank + k) % fused.ranks;
      every_tile<0, true, Feedback>(block, slice_of(fused, peer, section), shared.encode[peer], family);
    }
    if (!exchange(block, fused, rank, index, Stage::scattered, epoch, Point::stored, Point::arrived)) return;
    every_tile<Count, true, true>(block, mine, shared.reduce, family);
    block.meet(Point::reduced);
    push(block, fused, rank, kOutbox, index, mine, shared.reduce);
    if (!exchange(block, fused, rank, index, Stage::gathered, epoch, Point::pushed, Point::gathered)) return;
    for (int k = 1; k < fused.ranks; ++k) {
      const int peer = (rank + k) % fused.ranks;
      every_tile<1, false, false>(block, slice_of(fused, peer, section), shared.decode[peer], family);
    }
    block.meet(Point::done);
  }
  leave(block, fused, rank, index, Algorithm::two_shot, epoch);
}

// The same in one: everybody encodes everything once, and sums up everything. `Count` is ranks, or kAnyCount.
template <int Count, bool Feedback, class Family, class Block>
DTCOMM_DEVICE void one_shot(const Block& block, const Fused& fused, const Family& family, int rank, unsigned index) {
  Shared& shared = block.shared();
  const Seat& seat = fused.seats[rank - fused.first];
  std::uint32_t epoch = enter(block, fused, rank, index, Algorithm::one_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    const unsigned half = kHalves + block.half(epoch);
    const Slice slice = whole_of(fused, section);
    if (static_cast<int>(block.thread()) == rank) {
      aim(fused, seat.encode, slice, shared.encode[rank]);
      shared.encode[rank].payload_out = slot(fused, fused.peers[rank], half, index, rank);
      aim(fused, seat.reduce, slice, shared.reduce);
      for (int r = 0; r < fused.ranks; ++r) shared.reduce.near[r] = slot(fused, fused.peers[rank], half, index, r);
    }
    block.meet(Point::aimed);
    every_tile<0, true, Feedback>(block, slice, shared.encode[rank], family);
    block.meet(Point::reduced);
    push(block, fused, rank, half, index, slice, shared.encode[rank]);
    if (!exchange(block, fused, rank, index, Stage::shot, epoch, Point::pushed, Point::gathered)) return;
    every_tile<Count, false, false>(block, slice, shared.reduce, family);
    block.meet(Point::done);
  }
  leave(block, fused, rank, index, Algorithm::one_shot, epoch);
}

}  // namespace dtcomm::cuda
