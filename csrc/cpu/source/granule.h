// One granule of any family: what `combine` and `decode` are loops of.
#pragma once

#include "codec/layout.h"
#include "cpu/kernels.h"
#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"
#include "cpu/source/hadamard.h"

namespace dtcomm::DTCOMM_ISA {

// A streamed `to` is aligned to a line; only casts stream.
template <bool Stream>
inline void encode_granule(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  if (plan.family) return plan.family->encode(plan, x, n, how, to);
  narrow<Stream>(plan.wire, x, n, to);
  const std::size_t used = plan.layout.used(n);
  __builtin_memset(to + used, 0, plan.layout.bytes(n) - used);
}

// A streamed `to` is aligned to a line.
template <bool Stream>
inline void decode_granule(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to) {
  if (plan.family) return plan.family->decode(plan, from, n, to, Stream);
  widen_into<Stream>(plan.wire, from, n, to);
}

// The floats of a payload's granule: the payload itself where it holds fp32, otherwise `scratch`.
inline const float* floats_of(const Plan& plan, const std::uint8_t* from, std::size_t n, float* scratch) {
  if (!plan.family) return widen(plan.wire, from, n, scratch);
  plan.family->decode(plan, from, n, scratch, false);
  return scratch;
}

// to = sum + the granule's floats, in one pass; `to` may be `sum`.
inline void add_granule(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  if (plan.family) return plan.family->add(plan, from, n, sum, to);
  add_elements(plan.wire, to, sum, from, n);
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

// The same of floats of the family's (plan.floats(n) of them), which may be rotated; `work` has room for them and may
// be `from`.
inline void put_terms(const Plan& plan, DType dtype, const float* from, std::size_t n, void* to, bool stream,
                      float* work, float* scratch) {
  if (!plan.codec.rotate) return put_floats(dtype, from, n, to, stream, scratch);
  const std::size_t block = plan.layout.block;
  if (dtype == DType::f32) {
    auto* floats = static_cast<float*>(to);
    if (!stream) return rotate_back<false>(block, from, n, floats, work);
    if (reinterpret_cast<std::uintptr_t>(to) % kLine == 0) return rotate_back<true>(block, from, n, floats, work);
  }
  rotate_back<false>(block, from, n, work, work);
  put_floats(dtype, work, n, to, stream, scratch);
}

// A granule into the user's tensor: directly where that is fp32, otherwise by way of `floats` and `scratch`.
inline void decode_into(const Plan& plan, const std::uint8_t* from, std::size_t n, DType dtype, void* to, bool stream,
                        float* floats, float* scratch) {
  if (plan.codec.rotate) {
    plan.family->decode(plan, from, plan.floats(n), floats, false);
    return put_terms(plan, dtype, floats, n, to, stream, floats, scratch);
  }
  if (dtype != DType::f32) return put_floats(dtype, floats_of(plan, from, n, floats), n, to, stream, scratch);
  if (!stream) return decode_granule<false>(plan, from, n, static_cast<float*>(to));
  if (kDirect && reinterpret_cast<std::uintptr_t>(to) % kLine == 0) {
    return decode_granule<true>(plan, from, n, static_cast<float*>(to));
  }
  put_floats(dtype, floats_of(plan, from, n, floats), n, to, stream, scratch);
}

}  // namespace dtcomm::DTCOMM_ISA
