// Chooses the kernel of a codec family that serves a call. Host code only.
#pragma once

#include "cuda/combine_tile.cuh"

namespace dtcomm::cuda {

constexpr unsigned kThreads = 256;  // of a thread block, unless a group of lanes needs more

inline unsigned threads_of(unsigned group) { return group > kThreads ? kMaxBlockThreads : kThreads; }

// Thread blocks of `threads` threads that the elements of a call take.
inline unsigned tiles(const KernelParams& params, unsigned threads) {
  const std::uint64_t elements = (params.last << params.granule_shift) + params.tail.n;
  return static_cast<unsigned>((elements + threads * kVec8 - 1) / (threads * kVec8));
}

template <int Count, bool Encodes, bool Feedback>
struct CombineVariant {
  static constexpr int kCount = Count;
  static constexpr bool kEncodes = Encodes, kFeedback = Feedback;
};

template <bool Encodes, bool Feedback, class Use>
auto with_payload_count(const KernelParams& params, const Use& use) {
  if (params.op == ReduceOp::sum) {
    switch (params.count) {
      case 0:
        if constexpr (Encodes) return use(CombineVariant<0, Encodes, Feedback>());
        break;
      case 1:
        return use(CombineVariant<1, Encodes, Feedback>());
      case 7:
        return use(CombineVariant<7, Encodes, Feedback>());
      case 8:
        return use(CombineVariant<8, Encodes, Feedback>());
      default:
        break;
    }
  }
  return use(CombineVariant<kAnyCount, Encodes, Feedback>());
}

// use(CombineVariant<...>()). Codecs whose speed matters most (`kSpecialized`) have a kernel for each of the usual
// numbers of payloads, and one that keeps no decoded floats; all others have two, which decide at run time.
template <class Family, class Use>
auto with_kernel_variant(const KernelParams& params, const Use& use) {
  if constexpr (Family::kSpecialized) {
    if (!params.payload_out) return with_payload_count<false, false>(params, use);
    if (params.out || params.residual_out) return with_payload_count<true, true>(params, use);
    return with_payload_count<true, false>(params, use);
  } else {
    return params.payload_out ? use(CombineVariant<kAnyCount, true, true>())
                              : use(CombineVariant<kAnyCount, false, false>());
  }
}

}  // namespace dtcomm::cuda
