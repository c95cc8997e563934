// Encoding, decoding and adding one granule of any family; combine.h loops over these functions.
#pragma once

#include "codec/layout.h"
#include "cpu/kernels.h"
#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"
#include "cpu/source/hadamard.h"
#include "cpu/source/stochastic_bf16.h"

namespace dtcomm::DTCOMM_ISA {

// A streamed `to` is aligned to a line; only casts stream.
template <bool Stream>
inline void encode_granule(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                           std::uint8_t* to) {
  if (params.family) return params.family->encode(params, x, n, args, to);
  if (params.codec.stochastic && params.codec.family == Family::bf16) {
    stochastic_bf16_from_floats(x, n, args.key, args.index, to);
  } else {
    narrow<Stream>(params.wire, x, n, to);
  }
  const std::size_t used = params.layout.used(n);
  __builtin_memset(to + used, 0, params.layout.bytes(n) - used);
}

// A streamed `to` is aligned to a line.
template <bool Stream>
inline void decode_granule(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to) {
  if (params.family) return params.family->decode(params, from, n, to, Stream);
  widen_into<Stream>(params.wire, from, n, to);
}

// The floats of a payload's granule: the payload itself if it holds fp32, else `scratch`.
inline const float* floats_of(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* scratch) {
  if (!params.family) return widen(params.wire, from, n, scratch);
  params.family->decode(params, from, n, scratch, false);
  return scratch;
}

// to = sum + the granule's floats, in one pass; `to` may be `sum`.
inline void add_granule(const CodecParams& params, const std::uint8_t* from, std::size_t n, const float* sum,
                        float* to) {
  if (params.family) return params.family->add(params, from, n, sum, to);
  add_elements(params.wire, to, sum, from, n);
}

// Writes floats to the user's tensor; `scratch` holds them in the tensor's type before a streamed store.
inline void put_floats(DType dtype, const float* from, std::size_t n, void* to, bool stream, float* scratch) {
  if (!stream || dtype == DType::f32) {
    if (stream) return stream_copy(to, from, n * sizeof(float));
    return narrow(dtype, from, n, to);
  }
  narrow(dtype, from, n, scratch);
  stream_copy(to, scratch, n * size_of(dtype));
}

// The same for floats in the codec's domain (params.floats(n) of them), which may be rotated; `work` has room for them
// and may be `from`.
inline void put_terms(const CodecParams& params, DType dtype, const float* from, std::size_t n, void* to, bool stream,
                      float* work, float* scratch) {
  if (!params.codec.rotate) return put_floats(dtype, from, n, to, stream, scratch);
  const std::size_t block = params.layout.block;
  if (dtype == DType::f32) {
    auto* floats = static_cast<float*>(to);
    if (!stream) return rotate_back<false>(block, from, n, floats, work);
    if (reinterpret_cast<std::uintptr_t>(to) % kLine == 0) return rotate_back<true>(block, from, n, floats, work);
  }
  rotate_back<false>(block, from, n, work, work);
  put_floats(dtype, work, n, to, stream, scratch);
}

// Decodes a granule into the user's tensor: directly if that is fp32, else through `floats` and `scratch`.
inline void decode_into(const CodecParams& params, const std::uint8_t* from, std::size_t n, DType dtype, void* to,
                        bool stream, float* floats, float* scratch) {
  if (params.codec.rotate) {
    params.family->decode(params, from, params.floats(n), floats, false);
    return put_terms(params, dtype, floats, n, to, stream, floats, scratch);
  }
  if (dtype != DType::f32) return put_floats(dtype, floats_of(params, from, n, floats), n, to, stream, scratch);
  if (!stream) return decode_granule<false>(params, from, n, static_cast<float*>(to));
  if (kDirect && reinterpret_cast<std::uintptr_t>(to) % kLine == 0) {
    return decode_granule<true>(params, from, n, static_cast<float*>(to));
  }
  put_floats(dtype, floats_of(params, from, n, floats), n, to, stream, scratch);
}

}  // namespace dtcomm::DTCOMM_ISA
