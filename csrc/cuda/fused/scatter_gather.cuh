// reduce_scatter, all_gather and all_to_all in one launch: every shard has granules of its own, is stored where its
// receiver reads it, and is summed or decoded there. As in one_shot, there is one signal a section and slots alternate.
// A block signals every peer in every section, even without data for it, so that this holds for shards of any size.
#pragma once

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

// Writes a section's payload from the elements that the parameters point at.
template <class Family, class Block>
DTCOMM_DEVICE void encode_shard(const Block& block, const FusedParams& fused, const KernelParams& params,
                                const Family& family) {
  if (fused.verbatim) {
    copy_bytes(block, params.local, params.payload_out, element_count(params) * fused.element_bytes);
  } else {
    combine_range<0, true, true>(block, params, family);
  }
}

// The inverse of encode_shard.
template <class Family, class Block>
DTCOMM_DEVICE void decode_shard(const Block& block, const FusedParams& fused, const KernelParams& params,
                                const Family& family) {
  if (fused.verbatim) {
    copy_bytes(block, params.payloads[0], params.out, element_count(params) * fused.element_bytes);
  } else {
    combine_range<1, false, false>(block, params, family);
  }
}

// Every rank sums the shards that all ranks have for it; its own contribution is not encoded.
template <class Family, class Block>
DTCOMM_DEVICE void reduce_scatter(const Block& block, const FusedParams& fused, const Family& family, int rank,
                                  unsigned index) {
  Shared& shared = block.shared();
  std::uint32_t epoch = begin_block(block, fused, rank, index, Algorithm::one_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    const unsigned region = kAlternating + block.slot_parity(epoch);
    set_all_pointers(
        block, fused, rank,
        [&](Pass, int peer) {
          return section_range(fused, {fused.numel * static_cast<unsigned>(peer), 0, fused.numel}, section);
        },
        [&](Pass pass, int peer, KernelParams& params) {
          if (pass == Pass::encode) params.payload_out = slot(fused, fused.peers[peer], region, index, rank);
          if (pass == Pass::reduce) set_slot_payloads(fused, rank, region, index, false, params);
        });
    if (!pointers_ready(block)) return;
    for (int k = 1; k < fused.ranks; ++k) {
      combine_range<0, true, true>(block, shared.encode((rank + k) % fused.ranks), family);
    }
    if (!exchange_signals(block, fused, rank, index, SignalStage::shot, epoch, BarrierId::payloads_stored,
                          BarrierId::payloads_arrived))
      return;
    combine_range<kAnyCount, false, false>(block, shared.reduce(), family);
    block.sync_block(BarrierId::section_done);
  }
  end_block(block, fused, rank, index, Algorithm::one_shot, epoch);
}

// Every rank encodes its shard once and decodes the shards of all ranks, its own included.
template <class Family, class Block>
DTCOMM_DEVICE void all_gather(const Block& block, const FusedParams& fused, const Family& family, int rank,
                              unsigned index) {
  Shared& shared = block.shared();
  std::uint32_t epoch = begin_block(block, fused, rank, index, Algorithm::one_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    const unsigned region = kAlternating + block.slot_parity(epoch);
    set_all_pointers(
        block, fused, rank,
        [&](Pass, int peer) {
          return section_range(fused, {0, fused.numel * static_cast<unsigned>(peer), fused.numel}, section);
        },
        [&](Pass pass, int peer, KernelParams& params) {
          if (pass == Pass::encode) params.payload_out = slot(fused, fused.peers[rank], region, index, rank);
          if (pass == Pass::decode) params.payloads[0] = slot(fused, fused.peers[rank], region, index, peer);
        });
    if (!pointers_ready(block)) return;
    encode_shard(block, fused, shared.encode(rank), family);
    block.sync_block(BarrierId::sum_encoded);
    push_to_peers(block, fused, rank, region, index, shared.encode(rank));
    if (!exchange_signals(block, fused, rank, index, SignalStage::shot, epoch, BarrierId::payloads_pushed,
                          BarrierId::payloads_gathered))
      return;
    for (int k = 0; k < fused.ranks; ++k) {
      decode_shard(block, fused, shared.decode((rank + k) % fused.ranks), family);
    }
    block.sync_block(BarrierId::section_done);
  }
  end_block(block, fused, rank, index, Algorithm::one_shot, epoch);
}

// A rank copies the shard that it keeps, without encoding it.
template <class Family, class Block>
DTCOMM_DEVICE void all_to_all(const Block& block, const FusedParams& fused, const Family& family, int rank,
                              unsigned index) {
  Shared& shared = block.shared();
  std::uint32_t epoch = begin_block(block, fused, rank, index, Algorithm::one_shot);
  DTCOMM_LOOP
  for (std::uint32_t section = index; section < fused.sections; section += fused.blocks) {
    ++epoch;
    const unsigned region = kAlternating + block.slot_parity(epoch);
    set_all_pointers(
        block, fused, rank,
        [&](Pass pass, int peer) {
          const bool sends = pass == Pass::encode;
          return section_range(fused, shard_range(fused, sends ? rank : peer, sends ? peer : rank), section);
        },
        [&](Pass pass, int peer, KernelParams& params) {
          if (pass == Pass::encode) params.payload_out = slot(fused, fused.peers[peer], region, index, rank);
          if (pass == Pass::decode) params.payloads[0] = slot(fused, fused.peers[rank], region, index, peer);
        });
    if (!pointers_ready(block)) return;
    for (int k = 1; k < fused.ranks; ++k) encode_shard(block, fused, shared.encode((rank + k) % fused.ranks), family);
    const KernelParams& own = shared.encode(rank);
    copy_bytes(block, own.local, shared.decode(rank).out, element_count(own) * fused.element_bytes);
    if (!exchange_signals(block, fused, rank, index, SignalStage::shot, epoch, BarrierId::payloads_stored,
                          BarrierId::payloads_arrived))
      return;
    for (int k = 1; k < fused.ranks; ++k) decode_shard(block, fused, shared.decode((rank + k) % fused.ranks), family);
    block.sync_block(BarrierId::section_done);
  }
  end_block(block, fused, rank, index, Algorithm::one_shot, epoch);
}

}  // namespace dtcomm::cuda
