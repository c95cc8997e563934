// One pass of `combine` over a sparse codec: a thread block holds a granule, each thread an octet of its sum.
#pragma once

#include "codec/sparse.h"
#include "cuda/combine_tile.cuh"
#include "cuda/families/integer.cuh"

namespace dtcomm::cuda {

// What a granule of so many elements keeps, and where.
struct Part {
  std::uint32_t kept, last;  // values, and those before the last granule of their payload
  std::uint32_t positions_at;
  Shape shape;  // of that last granule
};

struct Sparse {
  Codec codec;
  AnyInteger integer;  // of the values, where they are integers
  DType wire;          // of the values elsewhere
  std::uint32_t head, position_bits, nested_bytes;
  Shape nested;  // of whole granules of values
  Part whole, tail;

  DTCOMM_DEVICE bool draws() const { return codec.family == Family::randk; }
  DTCOMM_DEVICE bool integers() const { return codec.element == Element::integer; }
};

// Values in shared memory, one a word; those of an octet lie in different banks.
DTCOMM_DEVICE std::uint32_t slot_of(std::uint32_t i) { return i % kOctet * kMostThreads + i / kOctet; }

constexpr std::uint32_t kSlots = kOctet * kMostThreads + 1;  // the last one: the first value of a payload

// The sum of `value` over the threads before this one; `total` becomes that over all.
template <class Lanes>
DTCOMM_DEVICE std::uint32_t sum_before(const Lanes& lanes, std::uint32_t value, std::uint32_t& total) {
  std::uint32_t before = 0;
  total = value;
  for (unsigned reach = 1; reach < kMostThreads; reach *= 2) {
    const std::uint32_t other = lanes.swap(total, reach);
    before += lanes.thread() & reach ? other : 0;
    total += other;
  }
  return before;
}

DTCOMM_DEVICE void decode_values(const Sparse& family, const Part& part, const std::uint8_t* values, std::uint32_t i,
                                 float (&v)[kOctet]) {
  if (family.integers()) {
    const std::uint32_t granule = i / kGranule, at = i % kGranule;
    const Shape& shape = granule * kGranule == part.last ? part.shape : family.nested;
    const bool there = i < part.kept;
    family.integer.decode(family.integer.load(shape, values + granule * family.nested_bytes, there ? at : shape.stored),
                          v);
  } else {
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kOctet; ++j) {
      v[j] = i + j < part.kept ? load_element(family.wire, values, i + j) : 0.0f;
    }
  }
  DTCOMM_UNROLL
  for (int j = 0; j < kOctet; ++j) v[j] = canonical(v[j]);
}

// This thread's octet of a payload's granule of n elements.
template <class Lanes>
DTCOMM_DEVICE void decode_sparse(const Lanes& lanes, const Sparse& family, const Part& part, std::uint32_t n,
                                 const std::uint8_t* from, float* room, float (&term)[kOctet]) {
  const std::uint32_t thread = lanes.thread(), first = thread * kOctet;
  float v[kOctet];
  decode_values(family, part, from + family.head, first, v);
  lanes.barrier();
  if (family.position_bits == 1) {  // a bitmap: each octet is a byte of it, its values those after all before it
    const std::uint32_t left = first < n ? n - first : 0;
    std::uint32_t bits = left ? from[part.positions_at + thread] : 0;
    if (left < kOctet) bits &= (1U << left) - 1;
    std::uint32_t count = 0, total;
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) {
      room[slot_of(first + static_cast<unsigned>(j))] = v[j];
      count += bits >> j & 1;
    }
    std::uint32_t rank = sum_before(lanes, count, total);
    lanes.barrier();
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) {
      const bool sent = (bits >> j & 1) != 0;
      term[j] = sent && rank < part.kept ? room[slot_of(rank)] : 0.0f;
      rank += sent;
    }
    return;
  }
  std::uint64_t own = 0;
  if (family.draws()) {
    for (std::uint32_t b = 0; b < kRandkHead; ++b) own |= static_cast<std::uint64_t>(from[b]) << 8 * b;
  }
  const Shuffle shuffle = family.draws() ? make_shuffle(own, n) : Shuffle{};
  DTCOMM_UNROLL
  for (std::uint32_t j = 0; j < kOctet; ++j) room[slot_of(first + j)] = 0.0f;
  if (thread == 0) room[kSlots - 1] = v[0];
  lanes.barrier();
  DTCOMM_LOOP
  for (std::uint32_t j = 0; j < kOctet; ++j) {
    if (first + j >= part.kept) continue;
    const std::uint32_t to =
        family.draws() ? shuffled(shuffle, first + j) : position_at(from + part.positions_at, first + j);
    if (to < n) room[slot_of(to)] = v[j];
  }
  lanes.barrier();
  const float lead = room[kSlots - 1];
  DTCOMM_UNROLL
  for (std::uint32_t j = 0; j < kOctet; ++j) {
    term[j] = family.draws() && lead != lead ? float_of(kNaN32) : room[slot_of(first + j)];
  }
}

// Which elements of this thread's octet are sent, and the rank of the first of them among all that are.
struct Sent {
  std::uint32_t bits, rank;
};

// The `kept` largest magnitudes, of equal ones the first.
template <class Lanes>
DTCOMM_DEVICE Sent select(const Lanes& lanes, const float (&x)[kOctet], int present, std::uint32_t kept) {
  const auto above = [&](std::uint32_t bound) {
    std::uint32_t count = 0;
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) count += j < present && magnitude(x[j]) >= bound ? 1 : 0;
    return count;
  };
  // The largest bound that `kept` magnitudes reach is the smallest magnitude that is sent.
  std::uint32_t threshold = 0, round = 0;
  DTCOMM_LOOP
  for (std::uint32_t bit = 1U << 30; bit > 0; bit >>= 1) {
    if (lanes.sum(above(threshold | bit), round++) >= kept) threshold |= bit;
  }
  std::uint32_t total = 0;
  const std::uint32_t larger = above(threshold + 1), reached = above(threshold);
  // Both counts in one word; each is at most 4096.
  const std::uint32_t before = sum_before(lanes, larger | (reached - larger) << 16, total);
  const std::uint32_t ties = kept - (total & 0xffff);
  std::uint32_t equals = before >> 16;
  Sent sent{0, (before & 0xffff) + (equals < ties ? equals : ties)};
  DTCOMM_UNROLL
  for (int j = 0; j < kOctet; ++j) {
    const std::uint32_t size = magnitude(x[j]);
    if (j < present && is_sent(size, threshold, equals, ties)) sent.bits |= 1U << j;
    equals += j < present && size == threshold;
  }
  return sent;
}

// The values of octet `i` of those that are sent, and what they decode to.
template <class Lanes>
DTCOMM_DEVICE void encode_values(const Lanes& lanes, const Call& call, const Sparse& family, const Part& part,
                                 std::uint64_t first, std::uint32_t i, float (&v)[kOctet], std::uint8_t* values,
                                 float (&decoded)[kOctet]) {
  const int live = part.kept < i ? 0 : part.kept - i < kOctet ? static_cast<int>(part.kept - i) : kOctet;
  if (!family.integers()) {
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) {
      if (j < live) store_element(family.wire, v[j], values, i + static_cast<unsigned>(j));
      const std::uint32_t half = family.wire == DType::f32 ? 0 : half_from_float(family.wire, v[j]);
      decoded[j] = canonical(family.wire == DType::f32 ? v[j] : float_from_half(family.wire, half));
    }
    return;
  }
  const std::uint32_t granule = i / kGranule;
  const bool last = granule * kGranule == part.last;
  const Shape& shape = last ? part.shape : family.nested;
  Place place = {};
  place.first = first + i;
  place.at = granule * kGranule <= part.last ? i % kGranule : i;
  place.present = live;
  std::uint8_t* to = values + granule * family.nested_bytes;
  family.integer.template encode<true>(lanes, call, shape, place, live, v, to, decoded);
  const std::uint32_t pad = shape.used + place.at / kOctet;
  if (!last && granule * kGranule < part.last && pad < shape.bytes) to[pad] = 0;
  DTCOMM_UNROLL
  for (int j = 0; j < kOctet; ++j) decoded[j] = canonical(decoded[j]);
}

// Returns what the granule decodes to, this thread's octet of it.
template <class Lanes>
DTCOMM_DEVICE void encode_sparse(const Lanes& lanes, const Call& call, const Sparse& family, const Part& part,
                                 const Place& place, const float (&x)[kOctet], float* room, std::uint8_t* to,
                                 float (&decoded)[kOctet]) {
  const std::uint32_t thread = lanes.thread(), first = thread * kOctet, n = place.shape->n;
  const std::uint64_t start = place.first - place.at;
  float v[kOctet], made[kOctet];
  const auto keep_octet = [&](const float (&octet)[kOctet]) {
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kOctet; ++j) room[slot_of(first + j)] = octet[j];
  };
  lanes.barrier();
  if (family.draws()) {
    const std::uint64_t own = granule_key(call.key, call.offset + start);
    const Shuffle shuffle = make_shuffle(own, n);
    const bool bad = top_of_group(lanes, kMostThreads, x) >= kInfinity32;
    const float factor = randk_factor(n, part.kept, call.residual_out != nullptr);
    keep_octet(x);
    lanes.barrier();
    std::uint32_t from[kOctet];
    DTCOMM_LOOP
    for (std::uint32_t j = 0; j < kOctet; ++j) {
      from[j] = first + j < part.kept ? shuffled(shuffle, first + j) : n;
      v[j] = from[j] >= n ? 0.0f : bad ? float_of(kNaN32) : room[slot_of(from[j])] * factor;
    }
    if (thread < kRandkHead) to[thread] = static_cast<std::uint8_t>(own >> 8 * thread);
    encode_values(lanes, call, family, part, start, first, v, to + family.head, made);
    lanes.barrier();
    if (thread == 0) room[kSlots - 1] = made[0];
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kOctet; ++j) room[slot_of(first + j)] = 0.0f;
    lanes.barrier();
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kOctet; ++j) {
      if (from[j] < n) room[slot_of(from[j])] = made[j];
    }
    lanes.barrier();
    const float lead = room[kSlots - 1];
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kOctet; ++j) {
      decoded[j] = lead != lead ? float_of(kNaN32) : room[slot_of(first + j)];
    }
    return;
  }
  const Sent sent = select(lanes, x, place.present, part.kept);
  if (family.position_bits == 1) {
    if (first < n) to[part.positions_at + thread] = static_cast<std::uint8_t>(sent.bits);
  } else {
    std::uint32_t rank = sent.rank;
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kOctet; ++j) {
      if (sent.bits >> j & 1) room[slot_of(rank++)] = float_of(first + j);
    }
    lanes.barrier();
    DTCOMM_UNROLL
    for (std::uint32_t j = 0; j < kOctet; j += 2) {
      if (first + j >= part.kept) continue;
      const std::uint32_t second = first + j + 1 < part.kept ? bits_of(room[slot_of(first + j + 1)]) : 0;
      put_positions(to + part.positions_at, (first + j) / 2, part.kept, bits_of(room[slot_of(first + j)]), second);
    }
    lanes.barrier();
  }
  std::uint32_t rank = sent.rank;
  DTCOMM_UNROLL
  for (std::uint32_t j = 0; j < kOctet; ++j) {
    if (sent.bits >> j & 1) room[slot_of(rank++)] = canonical(x[j]);
  }
  lanes.barrier();
  DTCOMM_UNROLL
  for (std::uint32_t j = 0; j < kOctet; ++j) v[j] = first + j < part.kept ? room[slot_of(first + j)] : 0.0f;
  encode_values(lanes, call, family, part, start, first, v, to + family.head, made);
  lanes.barrier();
  keep_octet(made);
  lanes.barrier();
  rank = sent.rank;
  DTCOMM_UNROLL
  for (std::uint32_t j = 0; j < kOctet; ++j) decoded[j] = sent.bits >> j & 1 ? room[slot_of(rank++)] : 0.0f;
}

// Granule `tile`; `room` is shared memory of kSlots words.
template <bool Encodes, class Lanes>
DTCOMM_DEVICE void combine_sparse(const Lanes& lanes, const Call& call, const Sparse& family, std::uint64_t tile,
                                  float* room) {
  const Place place = place_of(call, tile, lanes.thread(), lanes.threads());
  const Part& part = place.shape == &call.tail ? family.tail : family.whole;
  Sum<false> sum{ReduceOp::sum};
  float term[kOctet] = {};
  DTCOMM_LOOP
  for (int t = 0; t <= call.count; ++t) {
    if (call.has_local && t == call.position) {
      load_local(lanes, call, family.integer, place, term);
      sum.add(term);
    }
    if (t < call.count) {
      decode_sparse(lanes, family, part, place.shape->n, call.payload(t) + place.granule, room, term);
      sum.add(term);
    }
  }
  float (&x)[kOctet] = sum.value;
  DTCOMM_UNROLL
  for (int j = 0; j < kOctet; ++j) {
    if (call.divides) x[j] = x[j] / call.divisor;
    if (call.joins) x[j] = canonical(x[j]);
    if (j >= place.present) x[j] = 0.0f;
  }
  if constexpr (!Encodes) {
    if (call.out) put_floats(lanes, call, place, x);
    if (call.residual_out) {
      float none[kOctet] = {};
      store_octet(lanes, DType::f32, none, call.residual_out, place.first, place.present, call.residual_wide,
                  place.whole);
    }
    return;
  }
  std::uint8_t* granule = call.payload_out + place.granule;
  float decoded[kOctet];
  encode_sparse(lanes, call, family, part, place, x, room, granule, decoded);
  const std::uint32_t pad = place.shape->used + lanes.thread();
  if (pad < place.shape->bytes) granule[pad] = 0;
  if (call.residual_out) {
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) x[j] = x[j] - decoded[j];
    keep_residual(lanes, call, place, x);
  }
  if (call.out) put_floats(lanes, call, place, decoded);
}

}  // namespace dtcomm::cuda
