// All-reduce in one launch over memory that peers write into: the direct algorithms (two_shot, one_shot) with any codec
// of the first tier. Payloads are stored where the receiver reads them; sums are in rank order and a sum is encoded
// once by its owner, whose own contribution is not encoded, so the bytes are those of csrc/engine's programs.
//
// Why a slot may be written again. two_shot: a block writes a peer's inbox of its next section after that peer has said
// `gathered` for this one, which it does when its sum is made; and its outbox after the peer has said `scattered` for
// the next section, which it does when it has decoded this one. one_shot has one signal a section, so slots take turns:
// the other half is written meanwhile, and this one only after the peer's signal for that.
#pragma once

#include "cuda/fused/epilogue.cuh"
#include "cuda/fused/pipeline.cuh"

namespace dtcomm::cuda {

// Thread block `index` of a rank. `Count` is ranks - 1 where that is known, else kAnyCount; `Feedback`: residuals.
template <int Count, bool Feedback, class Family, class Block>
DTCOMM_DEVICE void two_shot(const Block& block, const Fused& fused, const Family& family, int rank, unsigned index) {
  Shared& shared = block.shared();
  const Seat& seat = fused.seats[rank - fused.first];
  const bool own = Count == kAnyCount && fused.encodes_own, after = Count == kAnyCount && fused.after;
  std::uint32_t epoch = enter(block, fused, rank, index, Algorithm::two_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    aim_all(
        block, fused, rank, [&](Verb, int peer) { return section_of(fused, chunk_of(fused, peer), section); },
        [&](Verb verb, int peer, Call& call) {
          const Peer& mine = fused.peers[rank];
          if (verb == Verb::encode) call.payload_out = slot(fused, fused.peers[peer], kInbox, index, rank);
          if (verb == Verb::decode) call.near[0] = slot(fused, mine, kOutbox, index, peer);
          if (verb == Verb::reduce) {
            call.payload_out = slot(fused, mine, kOutbox, index, rank);
            point_at_slots(fused, rank, kInbox, index, own, call);
          }
        });
    if (!aimed(block)) return;
    for (int k = own ? 0 : 1; k < fused.ranks; ++k) {
      const int peer = (rank + k) % fused.ranks;
      every_tile<0, true, Feedback>(block, shared.encode(peer), family);
    }
    if (!exchange(block, fused, rank, index, Stage::scattered, epoch, Point::stored, Point::arrived)) return;
    every_tile<Count, true, true>(block, shared.reduce(), family);
    block.meet(Point::reduced);
    push(block, fused, rank, kOutbox, index, shared.reduce());
    if (!exchange(block, fused, rank, index, Stage::gathered, epoch, Point::pushed, Point::gathered)) return;
    // The own sum is written with its encoding, unless more follows.
    for (int k = after ? 0 : 1; k < fused.ranks; ++k) {
      const int peer = (rank + k) % fused.ranks;
      if (after) {
        const Run run = section_of(fused, chunk_of(fused, peer), section);
        finish<1>(block, fused, seat, run.out, shared.decode(peer), family);
      } else {
        every_tile<1, false, false>(block, shared.decode(peer), family);
      }
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
    const Run run = section_of(fused, {0, 0, fused.numel}, section);
    aim_all(
        block, fused, rank, [&](Verb, int) { return run; },
        [&](Verb verb, int, Call& call) {
          if (verb == Verb::encode) call.payload_out = slot(fused, fused.peers[rank], half, index, rank);
          if (verb == Verb::reduce) point_at_slots(fused, rank, half, index, true, call);
        });
    if (!aimed(block)) return;
    every_tile<0, true, Feedback>(block, shared.encode(rank), family);
    block.meet(Point::reduced);
    push(block, fused, rank, half, index, shared.encode(rank));
    if (!exchange(block, fused, rank, index, Stage::shot, epoch, Point::pushed, Point::gathered)) return;
    if (Count == kAnyCount && fused.after) {
      finish<kAnyCount>(block, fused, seat, run.out, shared.reduce(), family);
    } else {
      every_tile<Count, false, false>(block, shared.reduce(), family);
    }
    block.meet(Point::done);
  }
  leave(block, fused, rank, index, Algorithm::one_shot, epoch);
}

}  // namespace dtcomm::cuda
