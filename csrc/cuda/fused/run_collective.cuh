// The work of a thread block in every fused collective, over memory that peers write into: all-reduce by the direct
// algorithms two_shot and one_shot, reduce_scatter, all_gather and all_to_all, for codecs of the first tier. One kernel
// serves them all: what differs is tested once a section, and the loops over elements, which take long to compile,
// exist once. Payloads are stored where the receiver reads them. Sums are in rank order. two_shot encodes a sum once,
// by its owner, whose own contribution is not encoded, so the bytes are those of csrc/engine's programs. Shards have
// granules of their own.
//
// When a slot may be written again. two_shot: a block writes a peer's inbox for its next section after that peer
// signalled `gathered` for this one, which it does when its sum is complete; and a peer's outbox after that peer
// signalled `scattered` for the next section, which it does when it has decoded this one. All others have one signal a
// section, so their slots alternate: a slot is written again after the peer's signal for the section in between. A
// block signals every peer in every section, even without data for it, so that this holds for shards of any size.
#pragma once

#include "cuda/fused/epilogue.cuh"
#include "cuda/fused/pipeline.cuh"

namespace dtcomm::cuda {

// The shard that `src` sends to `dst` in an all_to_all.
DTCOMM_DEVICE TensorRange shard_range(const FusedParams& fused, int src, int dst) {
  if (!fused.uneven)
    return {fused.numel * static_cast<unsigned>(dst), fused.numel * static_cast<unsigned>(src), fused.numel};
  TensorRange run{0, 0, fused.splits[src * fused.ranks + dst]};
  for (int to = 0; to < dst; ++to) run.in += fused.splits[src * fused.ranks + to];
  for (int from = 0; from < src; ++from) run.out += fused.splits[from * fused.ranks + dst];
  return run;
}

// What a pass of `rank` does for or with `peer`, over all sections.
DTCOMM_DEVICE TensorRange range_of(const FusedParams& fused, int rank, Pass pass, int peer) {
  const std::uint64_t shard = fused.numel * static_cast<unsigned>(peer);
  switch (fused.collective) {
    case Collective::reduce_scatter:
      return {shard, 0, fused.numel};
    case Collective::all_gather:
      return {0, shard, fused.numel};
    case Collective::all_to_all:
      return pass == Pass::encode ? shard_range(fused, rank, peer) : shard_range(fused, peer, rank);
    case Collective::all_reduce:
      break;
  }
  if (fused.algorithm == Algorithm::two_shot) return chunk_range_of(fused, peer);
  return {0, 0, fused.numel};
}

// The rank that is `distance` behind a rank, in a circle.
DTCOMM_DEVICE int rank_behind(const FusedParams& fused, int rank, unsigned distance) {
  const int peer = rank + static_cast<int>(distance);
  return peer < fused.ranks ? peer : peer - fused.ranks;
}

// Thread block `index` of a rank.
template <class Family, class Block>
DTCOMM_DEVICE void run_collective(const Block& block, const FusedParams& fused, const Family& family, int rank,
                                  unsigned index) {
  Shared& shared = block.shared();
  const auto two = [&] { return fused.algorithm == Algorithm::two_shot; };
  const auto sent = [&](unsigned k) -> const KernelParams& {
    return shared.encode(rank_behind(fused, rank, fused.first_sent + k));
  };
  const auto received = [&](unsigned k) -> const KernelParams& {
    return shared.decode(rank_behind(fused, rank, fused.first_received + k));
  };
  std::uint32_t epoch = begin_block(block, fused, rank, index, fused.algorithm);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    const auto region = [&] { return two() ? kInbox : kAlternating + block.slot_parity(epoch); };
    set_all_pointers(
        block, fused, rank,
        [&](Pass pass, int peer) { return section_range(fused, range_of(fused, rank, pass, peer), section); },
        [&](Pass pass, int peer, KernelParams& params) {
          const PeerPointers& mine = fused.peers[rank];
          if (pass == Pass::encode)
            params.payload_out = slot(fused, fused.scatters ? fused.peers[peer] : mine, region(), index, rank);
          if (pass == Pass::decode) params.payloads[0] = slot(fused, mine, two() ? kOutbox : region(), index, peer);
          if (pass == Pass::reduce) {
            if (two()) params.payload_out = slot(fused, mine, kOutbox, index, rank);
            set_slot_payloads(fused, rank, region(), index, fused.first_sent == 0, params);
          }
        });
    if (!pointers_ready(block)) return;
    if (fused.verbatim) {
      DTCOMM_LOOP
      for (unsigned k = 0; k < fused.sent; ++k)
        copy_elements(block, fused, sent(k), sent(k).local, sent(k).payload_out);
    } else {
      combine_ranges<0, true, true>(block, fused.sent, fused.largest_section, family, sent);
    }
    if (fused.keeps_own)
      copy_elements(block, fused, shared.encode(rank), shared.encode(rank).local, shared.decode(rank).out);
    if (!fused.scatters) {
      block.sync_block(BarrierId::sum_encoded);
      push_to_peers(block, fused, rank, region(), index, shared.encode(rank));
    }
    if (!exchange_signals(block, fused, rank, index, two() ? SignalStage::scattered : SignalStage::shot, epoch,
                          fused.scatters ? BarrierId::payloads_stored : BarrierId::payloads_pushed,
                          fused.scatters ? BarrierId::payloads_arrived : BarrierId::payloads_gathered))
      return;
    if (two()) {
      combine_range<kFewCount, true, true>(block, shared.reduce(), family);
      block.sync_block(BarrierId::sum_encoded);
      push_to_peers(block, fused, rank, kOutbox, index, shared.reduce());
      if (!exchange_signals(block, fused, rank, index, SignalStage::gathered, epoch, BarrierId::payloads_pushed,
                            BarrierId::payloads_gathered))
        return;
    }
    if (fused.has_epilogue) {
      DTCOMM_LOOP
      for (unsigned k = 0; k < fused.received; ++k) {
        const TensorRange all = range_of(fused, rank, Pass::decode, rank_behind(fused, rank, k));
        combine_with_epilogue(block, fused, fused.states[rank - fused.first_rank],
                              section_range(fused, all, section).out, fused.sums_last ? shared.reduce() : received(k),
                              family);
      }
    } else if (fused.verbatim) {
      DTCOMM_LOOP
      for (unsigned k = 0; k < fused.received; ++k) {
        copy_elements(block, fused, received(k), received(k).payloads[0], received(k).out);
      }
    } else if (fused.sums_last) {
      combine_range<kFewCount, false, false>(block, shared.reduce(), family);
    } else {
      combine_ranges<1, false, false>(block, fused.received, fused.largest_section, family, received);
    }
    block.sync_block(BarrierId::section_done);
  }
  end_block(block, fused, rank, index, fused.algorithm, epoch);
}

}  // namespace dtcomm::cuda
