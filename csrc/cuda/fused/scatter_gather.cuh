// reduce_scatter, all_gather and all_to_all in one launch: every shard is encoded on a grid of its own, stored where
// its receiver reads it, and summed or decoded there. As one_shot, all have one signal a section, and slots take turns;
// a block signals every peer in every section, also where it has nothing for it, so that this holds for shards of any
// size.
#pragma once

#include "cuda/fused/pipeline.cuh"

namespace dtcomm::cuda {

// The shard that `src` has for `dst` in an all_to_all.
DTCOMM_DEVICE Run exchanged(const Fused& fused, int src, int dst) {
  if (!fused.uneven)
    return {fused.numel * static_cast<unsigned>(dst), fused.numel * static_cast<unsigned>(src), fused.numel};
  Run run{0, 0, fused.splits[src * fused.ranks + dst]};
  for (int to = 0; to < dst; ++to) run.in += fused.splits[src * fused.ranks + to];
  for (int from = 0; from < src; ++from) run.out += fused.splits[from * fused.ranks + dst];
  return run;
}

// A section's payload, from the elements that a call points at.
template <class Family, class Block>
DTCOMM_DEVICE void put(const Block& block, const Fused& fused, const Call& call, const Family& family) {
  if (fused.verbatim) {
    move(block, call.local, call.payload_out, elements_of(call) * fused.element_bytes);
  } else {
    every_tile<0, true, true>(block, call, family);
  }
}

// The inverse.
template <class Family, class Block>
DTCOMM_DEVICE void take(const Block& block, const Fused& fused, const Call& call, const Family& family) {
  if (fused.verbatim) {
    move(block, call.near[0], call.out, elements_of(call) * fused.element_bytes);
  } else {
    every_tile<1, false, false>(block, call, family);
  }
}

// Every rank sums what all have for it, its own contribution unencoded.
template <class Family, class Block>
DTCOMM_DEVICE void reduce_scatter(const Block& block, const Fused& fused, const Family& family, int rank,
                                  unsigned index) {
  Shared& shared = block.shared();
  std::uint32_t epoch = enter(block, fused, rank, index, Algorithm::one_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    const unsigned half = kHalves + block.half(epoch);
    aim_all(
        block, fused, rank,
        [&](Verb, int peer) {
          return section_of(fused, {fused.numel * static_cast<unsigned>(peer), 0, fused.numel}, section);
        },
        [&](Verb verb, int peer, Call& call) {
          if (verb == Verb::encode) call.payload_out = slot(fused, fused.peers[peer], half, index, rank);
          if (verb == Verb::reduce) point_at_slots(fused, rank, half, index, false, call);
        });
    if (!aimed(block)) return;
    for (int k = 1; k < fused.ranks; ++k) {
      every_tile<0, true, true>(block, shared.encode((rank + k) % fused.ranks), family);
    }
    if (!exchange(block, fused, rank, index, Stage::shot, epoch, Point::stored, Point::arrived)) return;
    every_tile<kAnyCount, false, false>(block, shared.reduce(), family);
    block.meet(Point::done);
  }
  leave(block, fused, rank, index, Algorithm::one_shot, epoch);
}

// Everybody encodes its shard once and decodes all of them, its own too.
template <class Family, class Block>
DTCOMM_DEVICE void all_gather(const Block& block, const Fused& fused, const Family& family, int rank, unsigned index) {
  Shared& shared = block.shared();
  std::uint32_t epoch = enter(block, fused, rank, index, Algorithm::one_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    const unsigned half = kHalves + block.half(epoch);
    aim_all(
        block, fused, rank,
        [&](Verb, int peer) {
          return section_of(fused, {0, fused.numel * static_cast<unsigned>(peer), fused.numel}, section);
        },
        [&](Verb verb, int peer, Call& call) {
          if (verb == Verb::encode) call.payload_out = slot(fused, fused.peers[rank], half, index, rank);
          if (verb == Verb::decode) call.near[0] = slot(fused, fused.peers[rank], half, index, peer);
        });
    if (!aimed(block)) return;
    put(block, fused, shared.encode(rank), family);
    block.meet(Point::reduced);
    push(block, fused, rank, half, index, shared.encode(rank));
    if (!exchange(block, fused, rank, index, Stage::shot, epoch, Point::pushed, Point::gathered)) return;
    for (int k = 0; k < fused.ranks; ++k) {
      take(block, fused, shared.decode((rank + k) % fused.ranks), family);
    }
    block.meet(Point::done);
  }
  leave(block, fused, rank, index, Algorithm::one_shot, epoch);
}

// What a rank has for itself is copied as it is.
template <class Family, class Block>
DTCOMM_DEVICE void all_to_all(const Block& block, const Fused& fused, const Family& family, int rank, unsigned index) {
  Shared& shared = block.shared();
  std::uint32_t epoch = enter(block, fused, rank, index, Algorithm::one_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    const unsigned half = kHalves + block.half(epoch);
    aim_all(
        block, fused, rank,
        [&](Verb verb, int peer) {
          const bool given = verb == Verb::encode;
          return section_of(fused, exchanged(fused, given ? rank : peer, given ? peer : rank), section);
        },
        [&](Verb verb, int peer, Call& call) {
          if (verb == Verb::encode) call.payload_out = slot(fused, fused.peers[peer], half, index, rank);
          if (verb == Verb::decode) call.near[0] = slot(fused, fused.peers[rank], half, index, peer);
        });
    if (!aimed(block)) return;
    for (int k = 1; k < fused.ranks; ++k) put(block, fused, shared.encode((rank + k) % fused.ranks), family);
    const Call& own = shared.encode(rank);
    move(block, own.local, shared.decode(rank).out, elements_of(own) * fused.element_bytes);
    if (!exchange(block, fused, rank, index, Stage::shot, epoch, Point::stored, Point::arrived)) return;
    for (int k = 1; k < fused.ranks; ++k) take(block, fused, shared.decode((rank + k) % fused.ranks), family);
    block.meet(Point::done);
  }
  leave(block, fused, rank, index, Algorithm::one_shot, epoch);
}

}  // namespace dtcomm::cuda
