// Chooses the kernel of a codec family that serves a call. Host code only.
#pragma once

#include <tuple>

#include "cuda/combine_tile.cuh"

namespace dtcomm::cuda {

constexpr unsigned kThreads = 256;  // of a thread block, unless a group of lanes needs more

inline unsigned threads_of(unsigned group) { return group > kThreads ? kMaxBlockThreads : kThreads; }

// Vec8s that a thread block takes at a time.
template <class Family>
unsigned tile_vecs(const Family& family) {
  return Family::kSpecialized ? kThreads * kVecs<Family> : threads_of(family.group());
}

// Thread blocks, each of which takes `vecs` vec8s, that the elements of a call take.
inline unsigned tiles(const KernelParams& params, unsigned vecs) {
  const std::uint64_t elements = (params.last << params.granule_shift) + params.tail.n;
  return static_cast<unsigned>((elements + vecs * kVec8 - 1) / (vecs * kVec8));
}

// Whether the same kernel serves two calls of a codec and dtype.
inline bool same_kernel(const KernelParams& a, const KernelParams& b) {
  const auto kind = [](const KernelParams& params) {
    const int count = params.op != ReduceOp::sum || params.count > 1 ? kAnyCount : params.count;
    const bool feedback = count == 0 && (params.out != nullptr || params.residual_out != nullptr);
    return std::tuple(count, params.payload_out != nullptr, feedback);
  };
  return kind(a) == kind(b);
}

// Adds an item of `tiles` thread blocks to a group that is not full. Items beyond `size` are never read.
template <class Item>
void add_item(Group<Item>& group, const Item& item, unsigned tiles) {
  if (group.size == 0) group.first_tile[0] = 0;
  group.items[group.size] = item;
  group.first_tile[group.size + 1] = group.first_tile[group.size] + tiles;
  ++group.size;
}

template <int Count, bool Encodes, bool Feedback>
struct CombineVariant {
  static constexpr int kCount = Count;
  static constexpr bool kEncodes = Encodes, kFeedback = Feedback;
};

// use(CombineVariant<...>()). All codecs have two kernels, which decide at run time. Those whose speed matters most
// (`kSpecialized`) also have kernels for encoding a tensor, with and without what it decodes to, and for decoding.
template <class Family, class Use>
auto with_kernel_variant(const KernelParams& params, const Use& use) {
  if constexpr (Family::kSpecialized) {
    const bool sums = params.op == ReduceOp::sum;
    if (!params.payload_out && sums && params.count == 1) return use(CombineVariant<1, false, false>());
    if (params.payload_out && sums && params.count == 0) {
      return params.out || params.residual_out ? use(CombineVariant<0, true, true>())
                                               : use(CombineVariant<0, true, false>());
    }
  }
  return params.payload_out ? use(CombineVariant<kAnyCount, true, true>())
                            : use(CombineVariant<kAnyCount, false, false>());
}

}  // namespace dtcomm::cuda
