// The kernel of dense codecs, cpu/kernels.h's `combine` in one pass: each thread computes a vec8 of the sum, from its
// first term to its code. The loads of several payloads are issued before any of them is used, and nothing may branch
// between them: the time of a kernel that waits for each load is that of its latencies.
#pragma once

#include <type_traits>

#include "codec/granules.h"
#include "cuda/hadamard.cuh"
#include "cuda/params.cuh"
#include "cuda/vec8.cuh"

namespace dtcomm::cuda {

constexpr int kAnyCount = -1;  // any number of payloads; includes min and max where the family has them
constexpr int kFewCount = -2;  // the same, but at most kFew
constexpr int kFew = 8;
constexpr int kBatch = 4;  // payloads that are loaded at once, where there may be any number
// Registers for payloads that are loaded at once, fewer where one payload takes eight.
constexpr int kBatchWords = 32, kAnyBatchWords = 16;

// What a codec family (families/*.cuh) provides:
//   kSpecialized    it has kernels of its own for encoding a tensor and for decoding
//   kHasMinMax      it serves min and max
//   kCanRotate      blocks may be rotated; rotates() says whether they are
//   kHasPadding     payloads may end with padding
//   Raw             a vec8 of a payload as it is loaded
//   load, decode    by all lanes together: a payload's vec8 as Raw, and Raw as floats; two steps, so that the loads of
//                   several payloads overlap
//   encode          called by all lanes together; writes scale and codes, and what they decode to
//                   `Whole` of both: the granule has all its elements, and so the vec8 all of its own; kSpecialized
//   group()         lanes that share a block

// The minimum or the maximum.
DTCOMM_DEVICE float reduce_pair(ReduceOp op, float a, float b) {
  const bool second = op == ReduceOp::min ? b < a : b > a;
  return second || b != b ? b : a;  // NaN wins; of equal values the first stays
}

// The running sum of a vec8. The compiler knows which term is the first where it knows their number.
template <bool Ordered>
struct Sum {
  ReduceOp op;
  float value[kVec8] = {};
  bool started = false;

  DTCOMM_DEVICE void add(const float (&term)[kVec8]) {
    if (Ordered && started && op != ReduceOp::sum) {  // a branch for all elements
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) value[j] = reduce_pair(op, value[j], term[j]);
    } else {
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) value[j] = started ? value[j] + term[j] : term[j];
    }
    started = true;
  }
};

template <class Lanes, class Family>
DTCOMM_DEVICE void load_local(const Lanes& lanes, const KernelParams& params, const Family& family,
                              const Vec8Position& pos, float (&x)[kVec8]) {
  if (params.local) {
    load_vec8(params.local_dtype, params.local, pos.first, pos.present, params.local_aligned, x);
  }
  if (params.residual_in) {
    float error[kVec8];
    load_vec8(DType::f32, params.residual_in, pos.first, pos.present, params.residual_aligned, error);
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = params.local ? x[j] + error[j] : error[j];
  }
  if constexpr (Family::kCanRotate) {
    if (family.rotates()) rotate(lanes, family.group(), pos.at, x);
  }
}

template <int Count, bool Whole, class Family, class Lanes>
DTCOMM_DEVICE void sum_terms(const Lanes& lanes, const KernelParams& params, const Family& family,
                             const GranuleShape& shape, const Vec8Position& pos, float (&x)[kVec8]) {
  constexpr bool kHasMinMax = Family::kHasMinMax && Count < 0;
  using Raw = typename Family::Raw;
  constexpr int kWords = sizeof(Raw) / sizeof(std::uint32_t);
  constexpr int kFits = (Count == kAnyCount ? kAnyBatchWords
                         : kWords > 4       ? kBatchWords - kWords
                                            : kBatchWords) /
                        kWords;
  constexpr int kMost = Count == kAnyCount ? kBatch : Count == kFewCount ? kFew : Count;
  constexpr int kAtOnce = kMost <= kFits ? kMost : kFits > 0 ? kFits : 1;
  Sum<kHasMinMax> sum{params.op};
  float local[kVec8] = {};
  if (Count != 0) {
    Raw raw[kAtOnce > 0 ? kAtOnce : 1] = {};
    const int count = Count < 0 ? params.count : Count;
    const int end = Count == kFewCount && kAtOnce == kFew ? 1 : count;  // one batch has all
    // Not unrolled: a batch is what is loaded at once.
    DTCOMM_LOOP
    for (int begin = 0; begin < end; begin += kAtOnce) {
      DTCOMM_UNROLL
      for (int t = 0; t < kAtOnce; ++t) {
        // Past the last payload it is loaded again, which costs less than a branch.
        const int of = Whole && begin + t >= count ? count - 1 : begin + t;
        if (Whole || of < count) {
          const auto* payload = Count == kAnyCount ? params.payload(of) : params.payloads[of];
          raw[t] = family.template load<Whole>(lanes, shape, payload + pos.granule, pos.at);
        }
      }
      if (begin == 0 && params.has_local) load_local(lanes, params, family, pos, local);
      DTCOMM_UNROLL
      for (int t = 0; t < kAtOnce; ++t) {
        if (begin + t >= count) continue;
        if (params.has_local && params.position == begin + t) sum.add(local);
        float term[kVec8];
        family.decode(raw[t], term);
        sum.add(term);
      }
    }
    if (params.has_local && params.position == count) {
      if (Count < 0 && count == 0) load_local(lanes, params, family, pos, local);
      sum.add(local);
    }
  } else {
    load_local(lanes, params, family, pos, local);
    sum.add(local);
  }
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) x[j] = params.divides ? sum.value[j] / params.divisor : sum.value[j];
}

template <class Lanes>
DTCOMM_DEVICE void store_output(const Lanes& lanes, const KernelParams& params, const Vec8Position& pos,
                                float (&x)[kVec8]) {
  if (params.canonical_nan) {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = canonical(x[j]);
  }
  store_vec8(lanes, params.out_dtype, x, params.out, pos.first, pos.present, params.out_aligned, pos.whole);
}

// Stores the results of a sum that is not encoded: the output, and a residual of zeros.
template <class Lanes>
DTCOMM_DEVICE void store_decoded_sum(const Lanes& lanes, const KernelParams& params, const Vec8Position& pos,
                                     float (&x)[kVec8]) {
  if (params.out) store_output(lanes, params, pos, x);
  if (!params.residual_out) return;
  float zeros[kVec8] = {};
  store_vec8(lanes, DType::f32, zeros, params.residual_out, pos.first, pos.present, params.residual_aligned, pos.whole);
}

// Stores residual = error * divisor, except where that is not finite: there the old residual stays.
template <class Lanes>
DTCOMM_DEVICE void store_residual(const Lanes& lanes, const KernelParams& params, const Vec8Position& pos,
                                  float (&error)[kVec8]) {
  const float* old = params.residual_in ? params.residual_in : params.residual_out;
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    error[j] = error[j] * params.divisor;
    if (!finite(error[j]) && j < pos.present) error[j] = load_element(DType::f32, old, pos.first + j);
  }
  store_vec8(lanes, DType::f32, error, params.residual_out, pos.first, pos.present, params.residual_aligned, pos.whole);
}

// The position of vec8 `v` of the `vecs` that a thread has in a tile; those of a warp follow each other.
DTCOMM_DEVICE Vec8Position vec8_position(const KernelParams& params, std::uint64_t tile, unsigned thread,
                                         unsigned threads, unsigned vecs = 1, unsigned v = 0) {
  Vec8Position pos;
  pos.first = (tile * threads * vecs + (thread / kWarp * vecs + v) * kWarp + thread % kWarp) * kVec8;
  std::uint64_t granule = pos.first >> params.granule_shift;
  granule = granule < params.last ? granule : params.last;
  const std::uint64_t start = granule << params.granule_shift;
  pos.granule = granule * params.granule_bytes;
  pos.at = static_cast<std::uint32_t>(pos.first - start);
  pos.shape = granule == params.last ? &params.tail : &params.whole;
  // No minimum and maximum: of such a clamp ptxas 13.0 keeps the predicate of VIMNMX.RELU as "all eight exist", which a
  // device sets for fewer, too, and then elements past the end were loaded (tests/cuda/test_sass.py).
  const std::uint32_t left = pos.shape->n > pos.at ? pos.shape->n - pos.at : 0;
  pos.present = pos.at + kVec8 <= pos.shape->n ? kVec8 : static_cast<int>(left);
  // All vec8s of a warp lie in one granule.
  const std::uint32_t warp = pos.at - thread % kWarp * kVec8;
  pos.whole = warp + kWarp * kVec8 <= pos.shape->n;
  return pos;
}

// The work of a vec8. `Whole` is as above.
template <int Count, bool Encodes, bool Feedback, bool Whole, class Family, class Lanes>
DTCOMM_DEVICE void combine_vec8(const Lanes& lanes, const KernelParams& params, const Family& family,
                                const Vec8Position& pos) {
  const GranuleShape& shape = Whole ? params.whole : *pos.shape;
  float x[kVec8];
  sum_terms<Count, Whole>(lanes, params, family, shape, pos, x);
  const bool rotates = Family::kCanRotate && family.rotates();
  if constexpr (!Encodes) {
    if constexpr (Family::kCanRotate) {
      if (rotates) rotate_back(lanes, family.group(), pos.at, x);
    }
    store_decoded_sum(lanes, params, pos, x);
    return;
  }
  // Elements that take part in the encoding; a rotated block is always whole.
  const int live = Whole || (rotates && pos.at < shape.stored) ? kVec8 : pos.present;
  if (live < kVec8) {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = j < live ? x[j] : 0.0f;
  }
  std::uint8_t* granule = params.payload_out + pos.granule;
  float decoded[kVec8], sum[kVec8];
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) sum[j] = x[j];  // encoding removes outliers from x
  family.template encode<Feedback, Whole>(lanes, params, shape, pos, live, x, granule, decoded);
  if (Family::kHasPadding) {
    const std::uint32_t pad = shape.used + pos.at / kVec8;
    if (pad < shape.bytes) granule[pad] = 0;
  }
  if constexpr (Feedback) {
    if (params.residual_out) {
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) x[j] = sum[j] - decoded[j];
      if constexpr (Family::kCanRotate) {
        if (rotates) rotate_back(lanes, family.group(), pos.at, x);
      }
      store_residual(lanes, params, pos, x);
    }
    if (params.out) {
      if constexpr (Family::kCanRotate) {
        if (rotates) rotate_back(lanes, family.group(), pos.at, decoded);
      }
      store_output(lanes, params, pos, decoded);
    }
  }
}

// Whether kernels of these lanes contain several passes over elements, as fused ones do.
template <class Lanes>
constexpr bool kManyPasses = false;

// The work of a vec8 in a granule that may be cut off, a tensor's last one, for any number of payloads. Fused kernels
// call it: they take long to compile and would contain this code once more for each pass. Others contain it: a call
// takes registers, 78 instead of 63 in sums of eight payloads of int8. It gets the tile and no reference to a position:
// with one, the caller kept every position in local memory, and on an H200 these stores were two thirds of what
// two_shot in `int8` wrote.
template <bool Encodes, bool Feedback, class Family, class Lanes>
DTCOMM_NOINLINE void combine_cut_vec8(Lanes lanes, const KernelParams& params, const Family& family,
                                      std::uint64_t tile) {
  const Vec8Position pos = vec8_position(params, tile, lanes.thread(), lanes.threads());
  combine_vec8<kAnyCount, Encodes, Feedback, false>(lanes, params, family, pos);
}

// The work of thread block `tile`. `Encodes`: there is a payload_out; `Feedback`: what it decodes to is needed, too.
template <int Count, bool Encodes, bool Feedback, class Family, class Lanes>
DTCOMM_DEVICE void combine_tile(const Lanes& lanes, const KernelParams& params, const Family& family,
                                std::uint64_t tile, unsigned vecs = 1, unsigned v = 0) {
  Vec8Position pos = vec8_position(params, tile, lanes.thread(), lanes.threads(), vecs, v);
  if constexpr (Family::kSpecialized) {
    // The same for all lanes of a warp.
    if (pos.whole && pos.shape->n == params.whole.n) {
      pos.present = kVec8;
      pos.whole = true;
      combine_vec8<Count, Encodes, Feedback, true>(lanes, params, family, pos);
    } else if constexpr (!kManyPasses<Lanes>) {
      combine_vec8<Count, Encodes, Feedback, false>(lanes, params, family, pos);
    } else {
      combine_cut_vec8<Encodes, Feedback>(lanes, params, family, tile);
    }
  } else {
    combine_vec8<Count, Encodes, Feedback, false>(lanes, params, family, pos);
  }
}

// The vec8s of a lane in a tile: a warp takes a whole granule where the family has encode_default and load_row.
template <class Family, class = void>
constexpr int kVecs = 1;
template <class Family>
constexpr int kVecs<Family, std::enable_if_t<(Family::kVecs > 1)>> = Family::kVecs;

// Whether combine_granule serves a call that encodes a tensor or decodes a payload.
template <bool Encodes, class Family>
DTCOMM_DEVICE bool is_default(const KernelParams& params, const Family& family) {
  const bool aligned = Encodes ? params.local && params.local_aligned : params.out && params.out_aligned;
  const DType dtype = Encodes ? params.local_dtype : params.out_dtype;
  return aligned && dtype == DType::f32 && family.is_default() && !params.residual_in && !params.residual_out &&
         !params.divides && !params.has_local == !Encodes;
}

// Encodes a tensor of fp32 or decodes to one; a warp takes a whole granule. All loads come first, and what is the same
// for the granule is computed once.
template <bool Encodes, class Family, class Lanes>
DTCOMM_DEVICE void combine_granule(const Lanes& lanes, const KernelParams& params, const Family& family,
                                   std::uint64_t granule) {
  const std::uint32_t lane = lanes.thread() % kWarp;
  const std::uint64_t first = granule * kGranule, offset = granule * params.granule_bytes;
  if constexpr (Encodes) {
    const float* in = static_cast<const float*>(params.local) + first + lane * kVec8;
    std::uint8_t* payload = params.payload_out + offset;
    constexpr int kWarpVec8s = kWarp * kVec8;
    float x[kVecs<Family>][kVec8];
    DTCOMM_UNROLL
    for (int v = 0; v < kVecs<Family>; ++v) load_vec8(DType::f32, in, v * kWarpVec8s, kVec8, true, x[v]);
    DTCOMM_UNROLL
    for (int v = 0; v < kVecs<Family>; ++v) family.encode_default(lanes, v * kWarpVec8s + lane * kVec8, x[v], payload);
  } else {
    // A lane takes four elements of each row, so that the stores of a warp fill whole sectors.
    constexpr int kRowElements = kWarp * 4, kRows = kGranule / kRowElements;
    float* out = static_cast<float*>(params.out) + first + lane * 4;
    const std::uint8_t* payload = params.payloads[0] + offset;
    typename Family::template Row<4> rows[kRows];
    bool are_finite = true;
    DTCOMM_UNROLL
    for (int r = 0; r < kRows; ++r) rows[r] = family.template load_row<4>(r, lane * 4, payload);
    DTCOMM_UNROLL
    for (int r = 0; r < kRows; ++r) are_finite = are_finite && finite(rows[r].scale);
    if (are_finite) {
      DTCOMM_UNROLL
      for (int r = 0; r < kRows; ++r) store_quad(family.template decode_row<true>(rows[r]), out + r * kRowElements);
    } else {
      DTCOMM_UNROLL
      for (int r = 0; r < kRows; ++r) store_quad(family.template decode_row<false>(rows[r]), out + r * kRowElements);
    }
  }
}

// Sums the payloads of a whole granule; or does nothing and returns false, where scales are not finite or so large that
// a sum might not be.
template <class Family, class Lanes>
DTCOMM_DEVICE bool sum_granule(const Lanes& lanes, const KernelParams& params, const Family& family,
                               std::uint64_t granule) {
  constexpr int kRowElements = kWarp * kVec8, kRows = kGranule / kRowElements;
  const std::uint32_t first = lanes.thread() % kWarp * kVec8;
  float sum[kRows][kVec8];
  bool are_small = true;
  const auto add = [&](int t, auto is_first) {
    const std::uint8_t* payload = params.payloads[t] + granule * params.granule_bytes;
    typename Family::template Row<kVec8> rows[kRows];
    DTCOMM_UNROLL
    for (int r = 0; r < kRows; ++r) rows[r] = family.template load_row<kVec8>(r, first, payload);
    DTCOMM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      are_small = are_small && magnitude(rows[r].scale) < bits_of(0x1p112f);
      family.template add_row<is_first>(rows[r], sum[r]);
    }
  };
  add(0, std::true_type());
  DTCOMM_LOOP
  for (int t = 1; t < params.count; ++t) add(t, std::false_type());
  if (lanes.warp_sum(are_small ? 1 : 0) != kWarp) return false;
  float* out = static_cast<float*>(params.out) + granule * kGranule + first;
  DTCOMM_UNROLL
  for (int r = 0; r < kRows; ++r) store_vec8(lanes, DType::f32, sum[r], out, r * kRowElements, kVec8, true, true);
  return true;
}

// The work of thread block `tile` of a group of calls.
template <int Count, bool Encodes, bool Feedback, class Family, class Lanes>
DTCOMM_DEVICE void combine_group_tile(const Lanes& lanes, const CallGroup& group, const Family& family, unsigned tile) {
  const unsigned item = group.item_of(tile);
  const KernelParams& params = group.items[item];
  const std::uint64_t index = tile - group.first_tile[item];
  constexpr bool kSums = Count == kAnyCount && !Encodes;
  if constexpr (kVecs<Family> > 1 && (Count >= 0 || kSums) && !Feedback) {
    const std::uint64_t granule = index * (lanes.threads() / kWarp) + lanes.thread() / kWarp;
    const bool whole = granule < params.last || (granule == params.last && params.tail.n == kGranule);
    if (whole && is_default<Encodes>(params, family)) {
      if constexpr (kSums) {
        const bool inline_sum = params.op == ReduceOp::sum && params.count <= kInlinePayloads;
        if (inline_sum && sum_granule(lanes, params, family, granule)) return;
      } else {
        combine_granule<Encodes>(lanes, params, family, granule);
        return;
      }
    }
  }
  // Warp by warp the same elements as above, so that a tile may mix both.
  DTCOMM_LOOP
  for (int v = 0; v < kVecs<Family>; ++v) {
    combine_tile<Count, Encodes, Feedback>(lanes, params, family, index, kVecs<Family>, v);
  }
}

}  // namespace dtcomm::cuda
