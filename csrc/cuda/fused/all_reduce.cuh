// All-reduce in one launch over memory that peers write into: the direct algorithms two_shot and one_shot, for codecs
// of the first tier. Payloads are stored where the receiver reads them. Sums are in rank order, and a sum is encoded
// once by its owner, whose own contribution is not encoded, so the bytes are those of csrc/engine's programs.
//
// When a slot may be written again. two_shot: a block writes a peer's inbox for its next section after that peer
// signalled `gathered` for this one, which it does when its sum is complete; and a peer's outbox after that peer
// signalled `scattered` for the next section, which it does when it has decoded this one. one_shot has one signal a
// section, so its slots alternate: a slot is written again after the peer's signal for the section in between.
#pragma once

#include "cuda/fused/epilogue.cuh"
#include "cuda/fused/pipeline.cuh"

namespace dtcomm::cuda {

// two_shot by thread block `index` of a rank. `Count` is ranks - 1 where that is known, else kAnyCount.
template <int Count, class Family, class Block>
DTCOMM_DEVICE void two_shot(const Block& block, const FusedParams& fused, const Family& family, int rank,
                            unsigned index) {
  Shared& shared = block.shared();
  const RankState& state = fused.states[rank - fused.first_rank];
  const bool own = Count == kAnyCount && fused.encodes_own, epilogue = Count == kAnyCount && fused.has_epilogue;
  std::uint32_t epoch = begin_block(block, fused, rank, index, Algorithm::two_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    set_all_pointers(
        block, fused, rank, [&](Pass, int peer) { return section_range(fused, chunk_range_of(fused, peer), section); },
        [&](Pass pass, int peer, KernelParams& params) {
          const PeerPointers& mine = fused.peers[rank];
          if (pass == Pass::encode) params.payload_out = slot(fused, fused.peers[peer], kInbox, index, rank);
          if (pass == Pass::decode) params.payloads[0] = slot(fused, mine, kOutbox, index, peer);
          if (pass == Pass::reduce) {
            params.payload_out = slot(fused, mine, kOutbox, index, rank);
            set_slot_payloads(fused, rank, kInbox, index, own, params);
          }
        });
    if (!pointers_ready(block)) return;
    const auto ranks = static_cast<unsigned>(fused.ranks);
    const auto peer_at = [&](unsigned distance) { return (rank + static_cast<int>(distance)) % fused.ranks; };
    const unsigned nearest = own ? 0 : 1;
    combine_ranges<0, true, true>(
        block, ranks - nearest, section_elements(fused), family,
        [&](unsigned k) -> const KernelParams& { return shared.encode(peer_at(nearest + k)); });
    if (!exchange_signals(block, fused, rank, index, SignalStage::scattered, epoch, BarrierId::payloads_stored,
                          BarrierId::payloads_arrived))
      return;
    combine_range<Count, true, true>(block, shared.reduce(), family);
    block.sync_block(BarrierId::sum_encoded);
    push_to_peers(block, fused, rank, kOutbox, index, shared.reduce());
    if (!exchange_signals(block, fused, rank, index, SignalStage::gathered, epoch, BarrierId::payloads_pushed,
                          BarrierId::payloads_gathered))
      return;
    // The own sum was written when it was encoded, unless there is an epilogue.
    if (epilogue) {
      for (unsigned k = 0; k < ranks; ++k) {
        const int peer = peer_at(k);
        const TensorRange run = section_range(fused, chunk_range_of(fused, peer), section);
        combine_with_epilogue<1>(block, fused, state, run.out, shared.decode(peer), family);
      }
    } else {
      combine_ranges<1, false, false>(block, ranks - 1, section_elements(fused), family,
                                      [&](unsigned k) -> const KernelParams& { return shared.decode(peer_at(1 + k)); });
    }
    block.sync_block(BarrierId::section_done);
  }
  end_block(block, fused, rank, index, Algorithm::two_shot, epoch);
}

// one_shot: every rank encodes its whole tensor once and sums the payloads of all. `Count` is ranks, or kAnyCount.
template <int Count, class Family, class Block>
DTCOMM_DEVICE void one_shot(const Block& block, const FusedParams& fused, const Family& family, int rank,
                            unsigned index) {
  Shared& shared = block.shared();
  const RankState& state = fused.states[rank - fused.first_rank];
  std::uint32_t epoch = begin_block(block, fused, rank, index, Algorithm::one_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    const unsigned region = kAlternating + block.slot_parity(epoch);
    const TensorRange run = section_range(fused, {0, 0, fused.numel}, section);
    set_all_pointers(
        block, fused, rank, [&](Pass, int) { return run; },
        [&](Pass pass, int, KernelParams& params) {
          if (pass == Pass::encode) params.payload_out = slot(fused, fused.peers[rank], region, index, rank);
          if (pass == Pass::reduce) set_slot_payloads(fused, rank, region, index, true, params);
        });
    if (!pointers_ready(block)) return;
    combine_range<0, true, true>(block, shared.encode(rank), family);
    block.sync_block(BarrierId::sum_encoded);
    push_to_peers(block, fused, rank, region, index, shared.encode(rank));
    if (!exchange_signals(block, fused, rank, index, SignalStage::shot, epoch, BarrierId::payloads_pushed,
                          BarrierId::payloads_gathered))
      return;
    if (Count == kAnyCount && fused.has_epilogue) {
      combine_with_epilogue<kAnyCount>(block, fused, state, run.out, shared.reduce(), family);
    } else {
      combine_range<Count, false, false>(block, shared.reduce(), family);
    }
    block.sync_block(BarrierId::section_done);
  }
  end_block(block, fused, rank, index, Algorithm::one_shot, epoch);
}

}  // namespace dtcomm::cuda
