// Which kernel of a family serves a call. Host code alone: csrc/tests/device uses it too.
#pragma once

#include "cuda/combine_tile.cuh"

namespace dtcomm::cuda {

constexpr unsigned kThreads = 256;  // of a thread block, unless a group of lanes needs more

inline unsigned threads_of(unsigned group) { return group > kThreads ? kMostThreads : kThreads; }

// Thread blocks of `threads` octets over the elements of a call.
inline unsigned tiles(const Call& call, unsigned threads) {
  const std::uint64_t elements = (call.last << call.granule_shift) + call.tail.n;
  return static_cast<unsigned>((elements + threads * kOctet - 1) / (threads * kOctet));
}

template <int Count, bool Encodes, bool Feedback>
struct Kernel {
  static constexpr int kCount = Count;
  static constexpr bool kEncodes = Encodes, kFeedback = Feedback;
};

template <bool Encodes, bool Feedback, class Run>
auto choose_count(const Call& call, const Run& run) {
  if (call.op == ReduceOp::sum) {
    switch (call.count) {
      case 0:
        if constexpr (Encodes) return run(Kernel<0, Encodes, Feedback>());
        break;
      case 1:
        return run(Kernel<1, Encodes, Feedback>());
      case 2:
        return run(Kernel<2, Encodes, Feedback>());
      case 4:
        return run(Kernel<4, Encodes, Feedback>());
      case 8:
        return run(Kernel<8, Encodes, Feedback>());
      default:
        break;
    }
  }
  return run(Kernel<kAnyCount, Encodes, Feedback>());
}

// run(Kernel<...>()). Codecs whose speed matters most (`kHot`) have a kernel for each of the usual numbers of payloads,
// and one that keeps no decoded floats; all others have two that ask as they go.
template <class Family, class Run>
auto choose(const Call& call, const Run& run) {
  if constexpr (Family::kHot) {
    if (!call.payload_out) return choose_count<false, false>(call, run);
    if (call.out || call.residual_out) return choose_count<true, true>(call, run);
    return choose_count<true, false>(call, run);
  } else {
    return call.payload_out ? run(Kernel<kAnyCount, true, true>()) : run(Kernel<kAnyCount, false, false>());
  }
}

}  // namespace dtcomm::cuda
