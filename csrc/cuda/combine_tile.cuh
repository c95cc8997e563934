// One pass of `combine` over dense codecs: each thread takes an octet of the sum from its first term to its code.
#pragma once

#include "cuda/hadamard.cuh"
#include "cuda/params.cuh"
#include "cuda/vec8.cuh"

namespace dtcomm::cuda {

constexpr int kAnyCount = -1;  // of payloads, min and max included where the family has them
constexpr int kBatch = 4;      // payloads whose codes are on their way at once, where the count is not known

// What a family gives (families/*.cuh):
//   kHot, kOrdered, kRotates, kPads  has kernels for each case; has min and max; may rotate; may need padding
//   Raw, load, decode             an octet of a payload as it is read, and as floats; two steps, so that the codes
//                                 of several payloads are on their way together
//   encode                        of all lanes together; writes scale and codes, and what they decode to
//   group()                       lanes that share a block; rotates(): whether blocks are rotated

DTCOMM_DEVICE float joined(ReduceOp op, float a, float b) {
  if (op == ReduceOp::sum) return a + b;
  const bool second = op == ReduceOp::min ? b < a : b > a;
  return second || b != b ? b : a;  // NaN wins; of equal values the first stays
}

// The running sum of an octet. Which term is the first is known to the compiler where the count is.
template <bool Ordered>
struct Sum {
  ReduceOp op;
  float value[kOctet] = {};
  bool started = false;

  DTCOMM_DEVICE void add(const float (&term)[kOctet]) {
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) {
      value[j] = !started ? term[j] : Ordered ? joined(op, value[j], term[j]) : value[j] + term[j];
    }
    started = true;
  }
};

template <class Lanes, class Family>
DTCOMM_DEVICE void load_local(const Lanes& lanes, const Call& call, const Family& family, const Place& place,
                              float (&x)[kOctet]) {
  if (call.local) {
    load_octet(call.local_dtype, call.local, place.first, place.present, call.local_wide, x);
  }
  if (call.residual_in) {
    float error[kOctet];
    load_octet(DType::f32, call.residual_in, place.first, place.present, call.residual_wide, error);
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) x[j] = call.local ? x[j] + error[j] : error[j];
  }
  if constexpr (Family::kRotates) {
    if (family.rotates()) rotate(lanes, family.group(), place.at, x);
  }
}

template <int Count, class Family, class Lanes>
DTCOMM_DEVICE void sum_terms(const Lanes& lanes, const Call& call, const Family& family, const Shape& shape,
                             const Place& place, float (&x)[kOctet]) {
  constexpr bool kOrdered = Family::kOrdered && Count == kAnyCount;
  constexpr int kAtOnce = Count == kAnyCount ? kBatch : Count;
  Sum<kOrdered> sum{call.op};
  float local[kOctet] = {};
  if (Count != 0) {
    typename Family::Raw raw[kAtOnce > 0 ? kAtOnce : 1] = {};
    const int count = Count == kAnyCount ? call.count : Count;
    // Not unrolled: the batch is what is under way at once.
    DTCOMM_LOOP
    for (int begin = 0; begin < count; begin += kAtOnce) {
      DTCOMM_UNROLL
      for (int t = 0; t < kAtOnce; ++t) {
        if (begin + t < count) raw[t] = family.load(shape, call.payload(begin + t) + place.granule, place.at);
      }
      if (begin == 0 && call.has_local) load_local(lanes, call, family, place, local);
      DTCOMM_UNROLL
      for (int t = 0; t < kAtOnce; ++t) {
        if (begin + t >= count) continue;
        if (call.has_local && call.position == begin + t) sum.add(local);
        float term[kOctet];
        family.decode(raw[t], term);
        sum.add(term);
      }
    }
    if (call.has_local && call.position == count) {
      if (Count == kAnyCount && count == 0) load_local(lanes, call, family, place, local);
      sum.add(local);
    }
  } else {
    load_local(lanes, call, family, place, local);
    sum.add(local);
  }
  DTCOMM_UNROLL
  for (int j = 0; j < kOctet; ++j) x[j] = call.divides ? sum.value[j] / call.divisor : sum.value[j];
}

template <class Lanes>
DTCOMM_DEVICE void put_floats(const Lanes& lanes, const Call& call, const Place& place, float (&x)[kOctet]) {
  if (call.canonical) {
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) x[j] = canonical(x[j]);
  }
  store_octet(lanes, call.out_dtype, x, call.out, place.first, place.present, call.out_wide, place.whole);
}

// residual = error * divisor, except where that is no number.
template <class Lanes>
DTCOMM_DEVICE void keep_residual(const Lanes& lanes, const Call& call, const Place& place, float (&error)[kOctet]) {
  const float* old = call.residual_in ? call.residual_in : call.residual_out;
  DTCOMM_UNROLL
  for (int j = 0; j < kOctet; ++j) {
    error[j] = error[j] * call.divisor;
    if (!finite(error[j]) && j < place.present) error[j] = load_element(DType::f32, old, place.first + j);
  }
  store_octet(lanes, DType::f32, error, call.residual_out, place.first, place.present, call.residual_wide, place.whole);
}

DTCOMM_DEVICE Place place_of(const Call& call, std::uint64_t tile, unsigned thread, unsigned threads) {
  Place place;
  place.first = (tile * threads + thread) * kOctet;
  std::uint64_t granule = place.first >> call.granule_shift;
  granule = granule < call.last ? granule : call.last;
  const std::uint64_t start = granule << call.granule_shift;
  place.granule = granule * call.granule_bytes;
  place.at = static_cast<std::uint32_t>(place.first - start);
  place.shape = granule == call.last ? &call.tail : &call.whole;
  const auto left = static_cast<std::int32_t>(place.shape->n) - static_cast<std::int32_t>(place.at);
  place.present = left < 0 ? 0 : left < kOctet ? left : kOctet;
  // A warp's octets lie in one granule.
  const std::uint32_t warp = place.at - thread % kWarp * kOctet;
  place.whole = warp + kWarp * kOctet <= place.shape->n;
  return place;
}

// Thread block `tile`. `Encodes`: there is a payload_out; `Feedback`: and what it decodes to is wanted.
template <int Count, bool Encodes, bool Feedback, class Family, class Lanes>
DTCOMM_DEVICE void combine_tile(const Lanes& lanes, const Call& call, const Family& family, std::uint64_t tile) {
  const Place place = place_of(call, tile, lanes.thread(), lanes.threads());
  const Shape& shape = *place.shape;
  float x[kOctet];
  sum_terms<Count>(lanes, call, family, shape, place, x);
  const bool rotates = Family::kRotates && family.rotates();
  if constexpr (!Encodes) {
    if constexpr (Family::kRotates) {
      if (rotates) rotate_back(lanes, family.group(), place.at, x);
    }
    if (call.out) put_floats(lanes, call, place, x);
    if (call.residual_out) {
      float none[kOctet] = {};
      store_octet(lanes, DType::f32, none, call.residual_out, place.first, place.present, call.residual_wide,
                  place.whole);
    }
    return;
  }
  // Elements that take part in the encoding: rotated, a block is always whole.
  const int live = rotates && place.at < shape.stored ? kOctet : place.present;
  if (live < kOctet) {
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) x[j] = j < live ? x[j] : 0.0f;
  }
  std::uint8_t* granule = call.payload_out + place.granule;
  float decoded[kOctet], sum[kOctet];
  DTCOMM_UNROLL
  for (int j = 0; j < kOctet; ++j) sum[j] = x[j];  // spikes are taken out of x
  family.template encode<Feedback>(lanes, call, shape, place, live, x, granule, decoded);
  if (Family::kPads) {
    const std::uint32_t pad = shape.used + place.at / kOctet;
    if (pad < shape.bytes) granule[pad] = 0;
  }
  if constexpr (Feedback) {
    if (call.residual_out) {
      DTCOMM_UNROLL
      for (int j = 0; j < kOctet; ++j) x[j] = sum[j] - decoded[j];
      if constexpr (Family::kRotates) {
        if (rotates) rotate_back(lanes, family.group(), place.at, x);
      }
      keep_residual(lanes, call, place, x);
    }
    if (call.out) {
      if constexpr (Family::kRotates) {
        if (rotates) rotate_back(lanes, family.group(), place.at, decoded);
      }
      put_floats(lanes, call, place, decoded);
    }
  }
}

}  // namespace dtcomm::cuda
