// The kernel of sparse codecs: a thread block holds a granule, each thread a vec8 of its sum.
#pragma once

#include "codec/sparse.h"
#include "cuda/combine_tile.cuh"
#include "cuda/families/integer.cuh"

namespace dtcomm::cuda {

// How many values a granule keeps, and where their parts lie.
struct Part {
  std::uint32_t kept, last;  // values, and the index of the first value in the last granule of the nested payload
  std::uint32_t positions_at;
  GranuleShape shape;  // of the nested payload's last granule
};

struct Sparse {
  Codec codec;
  AnyInteger integer;  // family of the values, where they are integers
  DType wire;          // type of the values otherwise
  std::uint32_t head, position_bits, nested_bytes;
  GranuleShape nested;  // of whole granules of the nested payload
  Part whole, tail;

  DTCOMM_DEVICE bool draws() const { return codec.family == Family::randk; }
  DTCOMM_DEVICE bool integers() const { return codec.element == Element::integer; }
};

// The place of value i in shared memory, one word each; those of a vec8 lie in different banks.
DTCOMM_DEVICE std::uint32_t slot_of(std::uint32_t i) { return i % kVec8 * kMaxBlockThreads + i / kVec8; }

constexpr std::uint32_t kSlots = kVec8 * kMaxBlockThreads + 1;  // the last slot holds the first value of a payload

template <class Lanes>
DTCOMM_DEVICE void decode_values(const Lanes& lanes, const Sparse& family, const Part& part, const std::uint8_t* values,
                                 std::uint32_t i, float (&v)[kVec8]) {
  if (family.integers()) {
    const std::uint32_t granule = i / kValueGranule, at = i % kValueGranule;
    const GranuleShape& shape = granule * kValueGranule == part.last ? part.shape : family.nested;
    const bool present = i < part.kept;
    family.integer.decode(family.integer.template load<false>(lanes, shape, values + granule * family.nested_bytes,
                                                              present ? at : shape.stored),
                          v);
  } else {
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kVec8; ++j) {
      v[j] = i + j < part.kept ? load_element(family.wire, values, i + j) : 0.0f;
    }
  }
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) v[j] = canonical(v[j]);
}

// Decodes this thread's vec8 of a payload's granule of n elements.
template <class Lanes>
DTCOMM_DEVICE void decode_sparse(const Lanes& lanes, const Sparse& family, const Part& part, std::uint32_t n,
                                 const std::uint8_t* from, float* slots, float (&term)[kVec8]) {
  const std::uint32_t thread = lanes.thread(), first = thread * kVec8;
  float v[kVec8];
  decode_values(lanes, family, part, from + family.head, first, v);
  lanes.sync_block();
  if (family.position_bits == 1) {  // a bitmap with a byte for each vec8; values are in the order of their elements
    const std::uint32_t left = first < n ? n - first : 0;
    std::uint32_t bits = left ? from[part.positions_at + thread] : 0;
    if (left < kVec8) bits &= (1U << left) - 1;
    std::uint32_t count = 0, total;
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      slots[slot_of(first + static_cast<unsigned>(j))] = v[j];
      count += bits >> j & 1;
    }
    std::uint32_t rank = sum_before(lanes, count, total);
    lanes.sync_block();
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      const bool sent = (bits >> j & 1) != 0;
      term[j] = sent && rank < part.kept ? slots[slot_of(rank)] : 0.0f;
      rank += sent;
    }
    return;
  }
  std::uint64_t own = 0;
  if (family.draws()) {
    for (std::uint32_t b = 0; b < kRandkHead; ++b) own |= static_cast<std::uint64_t>(from[b]) << 8 * b;
  }
  const Permutation permutation = family.draws() ? make_permutation(own, n) : Permutation{};
  DTCOMM_UNROLL
  for (std::uint32_t j = 0; j < kVec8; ++j) slots[slot_of(first + j)] = 0.0f;
  if (thread == 0) slots[kSlots - 1] = v[0];
  lanes.sync_block();
  DTCOMM_LOOP
  for (std::uint32_t j = 0; j < kVec8; ++j) {
    if (first + j >= part.kept) continue;
    const std::uint32_t to =
        family.draws() ? permuted(permutation, first + j) : position_at(from + part.positions_at, first + j);
    if (to < n) slots[slot_of(to)] = v[j];
  }
  lanes.sync_block();
  const float lead = slots[kSlots - 1];
  DTCOMM_UNROLL
  for (std::uint32_t j = 0; j < kVec8; ++j) {
    term[j] = family.draws() && lead != lead ? float_of(kNaN32) : slots[slot_of(first + j)];
  }
}

// Which elements of this thread's vec8 are sent, and the rank of the first of them among all elements that are sent.
struct Sent {
  std::uint32_t bits, rank;
};

// Selects the `kept` largest magnitudes; of equal ones, the first.
template <class Lanes>
DTCOMM_DEVICE Sent select(const Lanes& lanes, const float (&x)[kVec8], int present, std::uint32_t kept) {
  const auto above = [&](std::uint32_t bound) {
    std::uint32_t count = 0;
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) count += j < present && magnitude(x[j]) >= bound ? 1 : 0;
    return count;
  };
  // The threshold is the smallest magnitude that is sent: the largest bound that at least `kept` magnitudes reach.
  std::uint32_t threshold = 0, round = 0;
  DTCOMM_LOOP
  for (std::uint32_t bit = 1U << 30; bit > 0; bit >>= 1) {
    if (lanes.block_sum(above(threshold | bit), round++) >= kept) threshold |= bit;
  }
  std::uint32_t total = 0;
  const std::uint32_t larger = above(threshold + 1), reached = above(threshold);
  // Both counts in one word; each is at most 4096.
  const std::uint32_t before = sum_before(lanes, larger | (reached - larger) << 16, total);
  const std::uint32_t ties = kept - (total & 0xffff);
  std::uint32_t equals = before >> 16;
  Sent sent{0, (before & 0xffff) + (equals < ties ? equals : ties)};
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const std::uint32_t size = magnitude(x[j]);
    if (j < present && is_sent(size, threshold, equals, ties)) sent.bits |= 1U << j;
    equals += j < present && size == threshold;
  }
  return sent;
}

// Encodes the eight values from index i on, and returns what they decode to.
template <class Lanes>
DTCOMM_DEVICE void encode_values(const Lanes& lanes, const KernelParams& params, const Sparse& family, const Part& part,
                                 std::uint64_t first, std::uint32_t i, float (&v)[kVec8], std::uint8_t* values,
                                 float (&decoded)[kVec8]) {
  const int live = part.kept < i ? 0 : part.kept - i < kVec8 ? static_cast<int>(part.kept - i) : kVec8;
  if (!family.integers()) {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      if (j < live) store_element(family.wire, v[j], values, i + static_cast<unsigned>(j));
      const std::uint32_t half = family.wire == DType::f32 ? 0 : half_from_float(family.wire, v[j]);
      decoded[j] = canonical(family.wire == DType::f32 ? v[j] : float_from_half(family.wire, half));
    }
    return;
  }
  const std::uint32_t granule = i / kValueGranule;
  const bool last = granule * kValueGranule == part.last;
  const GranuleShape& shape = last ? part.shape : family.nested;
  Vec8Position pos = {};
  pos.first = first + i;
  pos.at = granule * kValueGranule <= part.last ? i % kValueGranule : i;
  pos.present = live;
  std::uint8_t* to = values + granule * family.nested_bytes;
  family.integer.template encode<true, false>(lanes, params, shape, pos, live, v, to, decoded);
  const std::uint32_t pad = shape.used + pos.at / kVec8;
  if (!last && granule * kValueGranule < part.last && pad < shape.bytes) to[pad] = 0;
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) decoded[j] = canonical(decoded[j]);
}

// Encodes a granule and returns this thread's vec8 of what it decodes to.
template <class Lanes>
DTCOMM_DEVICE void encode_sparse(const Lanes& lanes, const KernelParams& params, const Sparse& family, const Part& part,
                                 const Vec8Position& pos, const float (&x)[kVec8], float* slots, std::uint8_t* to,
                                 float (&decoded)[kVec8]) {
  const std::uint32_t thread = lanes.thread(), first = thread * kVec8, n = pos.shape->n;
  const std::uint64_t start = pos.first - pos.at;
  float v[kVec8], decoded_values[kVec8];
  const auto store_vec8_shared = [&](const float (&values)[kVec8]) {
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kVec8; ++j) slots[slot_of(first + j)] = values[j];
  };
  lanes.sync_block();
  if (family.draws()) {
    const std::uint64_t own = granule_key(params.key, params.offset + start);
    const Permutation permutation = make_permutation(own, n);
    const bool bad = group_max_magnitude(lanes, kMaxBlockThreads, x) >= kInfinity32;
    const float factor = randk_factor(n, part.kept, params.residual_out != nullptr);
    store_vec8_shared(x);
    lanes.sync_block();
    std::uint32_t from[kVec8];
    DTCOMM_LOOP
    for (std::uint32_t j = 0; j < kVec8; ++j) {
      from[j] = first + j < part.kept ? permuted(permutation, first + j) : n;
      v[j] = from[j] >= n ? 0.0f : bad ? float_of(kNaN32) : slots[slot_of(from[j])] * factor;
    }
    if (thread < kRandkHead) to[thread] = static_cast<std::uint8_t>(own >> 8 * thread);
    encode_values(lanes, params, family, part, start, first, v, to + family.head, decoded_values);
    lanes.sync_block();
    if (thread == 0) slots[kSlots - 1] = decoded_values[0];
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kVec8; ++j) slots[slot_of(first + j)] = 0.0f;
    lanes.sync_block();
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kVec8; ++j) {
      if (from[j] < n) slots[slot_of(from[j])] = decoded_values[j];
    }
    lanes.sync_block();
    const float lead = slots[kSlots - 1];
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kVec8; ++j) {
      decoded[j] = lead != lead ? float_of(kNaN32) : slots[slot_of(first + j)];
    }
    return;
  }
  const Sent sent = select(lanes, x, pos.present, part.kept);
  if (family.position_bits == 1) {
    if (first < n) to[part.positions_at + thread] = static_cast<std::uint8_t>(sent.bits);
  } else {
    std::uint32_t rank = sent.rank;
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kVec8; ++j) {
      if (sent.bits >> j & 1) slots[slot_of(rank++)] = float_of(first + j);
    }
    lanes.sync_block();
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kVec8; j += 2) {
      if (first + j >= part.kept) continue;
      const std::uint32_t second = first + j + 1 < part.kept ? bits_of(slots[slot_of(first + j + 1)]) : 0;
      put_positions(to + part.positions_at, (first + j) / 2, part.kept, bits_of(slots[slot_of(first + j)]), second);
    }
    lanes.sync_block();
  }
  std::uint32_t rank = sent.rank;
  DTCOMM_UNROLL
  for (std::uint32_t j = 0; j < kVec8; ++j) {
    if (sent.bits >> j & 1) slots[slot_of(rank++)] = canonical(x[j]);
  }
  lanes.sync_block();
  DTCOMM_UNROLL
  for (std::uint32_t j = 0; j < kVec8; ++j) v[j] = first + j < part.kept ? slots[slot_of(first + j)] : 0.0f;
  encode_values(lanes, params, family, part, start, first, v, to + family.head, decoded_values);
  lanes.sync_block();
  store_vec8_shared(decoded_values);
  lanes.sync_block();
  rank = sent.rank;
  DTCOMM_UNROLL
  for (std::uint32_t j = 0; j < kVec8; ++j) decoded[j] = sent.bits >> j & 1 ? slots[slot_of(rank++)] : 0.0f;
}

// The work of a thread block on granule `tile`; `slots` is shared memory of kSlots words.
template <bool Encodes, class Lanes>
DTCOMM_DEVICE void combine_sparse(const Lanes& lanes, const KernelParams& params, const Sparse& family,
                                  std::uint64_t tile, float* slots) {
  const Vec8Position pos = vec8_position(params, tile, lanes.thread(), lanes.threads());
  const Part& part = pos.shape == &params.tail ? family.tail : family.whole;
  Sum<false> sum{ReduceOp::sum};
  float term[kVec8] = {};
  DTCOMM_LOOP
  for (int t = 0; t <= params.count; ++t) {
    if (params.has_local && t == params.position) {
      load_local(lanes, params, family.integer, pos, term);
      sum.add(term);
    }
    if (t < params.count) {
      decode_sparse(lanes, family, part, pos.shape->n, params.payload(t) + pos.granule, slots, term);
      sum.add(term);
    }
  }
  float (&x)[kVec8] = sum.value;
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    if (params.divides) x[j] = x[j] / params.divisor;
    if (params.is_computed) x[j] = canonical(x[j]);
    if (j >= pos.present) x[j] = 0.0f;
  }
  if constexpr (!Encodes) {
    store_decoded_sum(lanes, params, pos, x);
    return;
  }
  std::uint8_t* granule = params.payload_out + pos.granule;
  float decoded[kVec8];
  encode_sparse(lanes, params, family, part, pos, x, slots, granule, decoded);
  const std::uint32_t pad = pos.shape->used + lanes.thread();
  if (pad < pos.shape->bytes) granule[pad] = 0;
  if (params.residual_out) {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = x[j] - decoded[j];
    store_residual(lanes, params, pos, x);
  }
  if (params.out) store_output(lanes, params, pos, decoded);
}

}  // namespace dtcomm::cuda
