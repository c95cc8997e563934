// One granule of any family: what `combine` and `decode` are loops of.
#pragma once

#include "codec/layout.h"
#include "cpu/kernels.h"
#include "cpu/source/cast.h"
#include "cpu/source/integer_decode.h"
#include "cpu/source/integer_encode.h"

namespace dtcomm::DTCOMM_ISA {

// A codec with everything that is the same for all granules of a call.
struct Plan {
  Codec codec;
  Layout layout;
  IntegerRules rules;  // Family::integer
  DType wire;          // the other families: type of an element in the payload

  Plan(const Codec& which, DType dtype) : codec(which), layout(layout_of(which, dtype)), rules(), wire(dtype) {
    if (which.family == Family::fp16) wire = DType::f16;
    if (which.family == Family::bf16) wire = DType::bf16;
    if (which.family == Family::integer) rules = integer_rules(which);
  }

  bool integer() const { return codec.family == Family::integer; }
};

// A streamed `to` is aligned to a line; Family::integer does not stream.
template <bool Stream>
inline void encode_granule(const Plan& plan, const float* x, std::size_t n, std::uint64_t key, std::uint64_t index,
                           std::uint8_t* to) {
  if (!plan.integer()) {
    narrow<Stream>(plan.wire, x, n, to);
    const std::size_t used = plan.layout.used(n);
    __builtin_memset(to + used, 0, plan.layout.bytes(n) - used);
  } else if (plan.codec.block == 32) {
    encode_integer<32>(plan.codec, plan.rules, plan.layout, x, n, key, index, to);
  } else {
    encode_integer<0>(plan.codec, plan.rules, plan.layout, x, n, key, index, to);
  }
}

// A streamed `to` is aligned to a line.
template <bool Stream>
inline void decode_granule(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to) {
  if (plan.integer()) {
    decode_integer<Stream>(plan.codec, plan.layout, from, n, to);
  } else {
    widen_into<Stream>(plan.wire, from, n, to);
  }
}

// The floats of a payload's granule: the payload itself where it holds fp32, otherwise `scratch`.
inline const float* floats_of(const Plan& plan, const std::uint8_t* from, std::size_t n, float* scratch) {
  if (!plan.integer()) return widen(plan.wire, from, n, scratch);
  decode_granule<false>(plan, from, n, scratch);
  return scratch;
}

// to = sum + the granule's floats, in one pass; `to` may be `sum`.
inline void add_granule(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  if (plan.integer()) {
    add_integer(plan.codec, plan.layout, from, n, sum, to);
  } else {
    add_elements(plan.wire, to, sum, from, n);
  }
}

// Floats into the user's tensor; `scratch` holds them in the tensor's type on the way to a streamed store.
inline void put_floats(DType dtype, const float* from, std::size_t n, void* to, bool stream, float* scratch) {
  if (!stream || dtype == DType::f32) {
    if (stream) return stream_copy(to, from, n * sizeof(float));
    return narrow(dtype, from, n, to);
  }
  narrow(dtype, from, n, scratch);
  stream_copy(to, scratch, n * size_of(dtype));
}

// A granule into the user's tensor: directly where that is fp32, otherwise by way of `floats` and `scratch`.
inline void decode_into(const Plan& plan, const std::uint8_t* from, std::size_t n, DType dtype, void* to, bool stream,
                        float* floats, float* scratch) {
  if (dtype != DType::f32) return put_floats(dtype, floats_of(plan, from, n, floats), n, to, stream, scratch);
  if (!stream) return decode_granule<false>(plan, from, n, static_cast<float*>(to));
  if (kDirect && reinterpret_cast<std::uintptr_t>(to) % kLine == 0) {
    return decode_granule<true>(plan, from, n, static_cast<float*>(to));
  }
  put_floats(dtype, floats_of(plan, from, n, floats), n, to, stream, scratch);
}

}  // namespace dtcomm::DTCOMM_ISA
