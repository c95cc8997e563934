// Chooses the fused kernel that serves a launch. Host code only, for launches on a device and in the emulator.
#pragma once

#include "cuda/fused/all_reduce.cuh"
#include "cuda/fused/scatter_gather.cuh"

namespace dtcomm::cuda {

// `Ranks` is their number where it is known, else kAnyCount.
template <Collective What, Algorithm Which, int Ranks>
struct FusedKernel {
  template <class Family, class Block>
  DTCOMM_DEVICE static void run(const Block& block, const FusedParams& fused, const Family& family, int rank,
                                unsigned index) {
    if constexpr (What == Collective::reduce_scatter) {
      reduce_scatter(block, fused, family, rank, index);
    } else if constexpr (What == Collective::all_gather) {
      all_gather(block, fused, family, rank, index);
    } else if constexpr (What == Collective::all_to_all) {
      all_to_all(block, fused, family, rank, index);
    } else if constexpr (Which == Algorithm::two_shot) {
      two_shot<Ranks == kAnyCount ? kAnyCount : Ranks - 1>(block, fused, family, rank, index);
    } else {
      one_shot<Ranks>(block, fused, family, rank, index);
    }
  }
};

// Sums of eight ranks, the usual number of a host, have kernels of their own.
template <Algorithm Which, class Use>
auto with_all_reduce_variant(const FusedParams& fused, const Use& use) {
  const bool plain = fused.states[0].params[static_cast<unsigned>(Pass::reduce)].op == ReduceOp::sum &&
                     !fused.has_epilogue && !fused.encodes_own;
  if (fused.ranks == kMaxRanks && plain) return use(FusedKernel<Collective::all_reduce, Which, kMaxRanks>());
  return use(FusedKernel<Collective::all_reduce, Which, kAnyCount>());
}

// use(FusedKernel<...>()). All kernels test at run time whether there are residuals.
template <class Use>
auto with_fused_variant(const FusedParams& fused, const Use& use) {
  switch (fused.collective) {
    case Collective::reduce_scatter:
      return use(FusedKernel<Collective::reduce_scatter, Algorithm::one_shot, kAnyCount>());
    case Collective::all_gather:
      return use(FusedKernel<Collective::all_gather, Algorithm::one_shot, kAnyCount>());
    case Collective::all_to_all:
      return use(FusedKernel<Collective::all_to_all, Algorithm::one_shot, kAnyCount>());
    default:
      break;
  }
  return fused.algorithm == Algorithm::two_shot ? with_all_reduce_variant<Algorithm::two_shot>(fused, use)
                                                : with_all_reduce_variant<Algorithm::one_shot>(fused, use);
}

}  // namespace dtcomm::cuda
