// From a collective to what a fused launch is handed. Host code alone: csrc/tests/device uses it too.
#pragma once

#include "cuda/peers.cuh"
#include "cuda/plan.h"

namespace dtcomm::cuda {

// One rank's part in an all-reduce of `numel` elements of `dtype` (f32, f16 or bf16).
struct Share {
  const void* input = nullptr;
  void* output = nullptr;                         // may be the input
  float* residual = nullptr;                      // added, and rewritten with what this rank's encodings lose
  std::uint64_t key_scatter = 0, key_reduce = 0;  // of stochastic rounding: of what goes to peers, and of its sum
};

struct AllReduce {
  Algorithm algorithm = Algorithm::two_shot;
  std::size_t numel = 1;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  std::size_t divisor = 1;
  int ranks = 2;
  unsigned blocks = 1;
  std::uint32_t section = 8;  // granules
  std::uint64_t budget = 0;
};

// Whether there are fused kernels for the codec: the first tier's, on blocks that a warp holds.
inline bool fusible(const Codec& codec, DType dtype) {
  if (is_sparse(codec) || exact_type(dtype)) return false;
  return with_family(codec, dtype, [](const auto& family) { return std::decay_t<decltype(family)>::kHot; });
}

// Everything but seats and peers, for virtual ranks.
inline Fused fused_of(const Codec& codec, const AllReduce& sum) {
  const Layout layout = layout_of(codec, sum.dtype);
  Fused fused = {};
  fused.ranks = fused.here = sum.ranks;
  fused.blocks = sum.blocks;
  fused.section = sum.section;
  fused.granules = (sum.numel + layout.granule - 1) / layout.granule;
  const auto chunks = sum.algorithm == Algorithm::two_shot ? static_cast<std::uint64_t>(sum.ranks) : 1;
  const std::uint64_t largest = (fused.granules + chunks - 1) / chunks;
  fused.sections = static_cast<std::uint32_t>((largest + sum.section - 1) / sum.section);
  fused.granule_elements = static_cast<std::uint32_t>(layout.granule);
  fused.slot_bytes = sum.section * layout.bytes(layout.granule);
  fused.element_bytes = static_cast<std::uint32_t>(size_of(sum.dtype));
  fused.budget = sum.budget;
  return fused;
}

inline Seat seat_of(const Codec& codec, const AllReduce& sum, int rank, const Share& share) {
  static const std::uint8_t* const kLater[kMostRanks] = {};  // places of payloads are the kernel's business
  alignas(16) static std::uint8_t there[16];
  const bool two = sum.algorithm == Algorithm::two_shot;
  Combine encode;
  encode.local = share.input;
  encode.numel = sum.numel;
  encode.local_dtype = encode.out_dtype = encode.dtype = sum.dtype;
  encode.residual_in = encode.residual_out = share.residual;
  encode.key = share.key_scatter;
  encode.payload_out = there;
  Combine decode;
  decode.payloads = kLater;
  decode.count = 1;
  decode.numel = sum.numel;
  decode.dtype = decode.out_dtype = sum.dtype;
  decode.out = share.output;
  Combine reduce = two ? encode : decode;
  reduce.payloads = kLater;
  reduce.count = two ? sum.ranks - 1 : sum.ranks;
  reduce.op = sum.op;
  reduce.divisor = sum.divisor;
  reduce.out = share.output;
  if (two) {
    reduce.position = rank;
    reduce.key = share.key_reduce;
  }
  return {plan(codec, encode, nullptr), plan(codec, reduce, nullptr), plan(codec, decode, nullptr)};
}

}  // namespace dtcomm::cuda
