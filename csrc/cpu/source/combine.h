// `combine` and `decode` of the kernel table (cpu/kernels.h specifies them): loops over the granules of a payload.
#pragma once

#include "cpu/kernels.h"
#include "cpu/source/combine_native_types.h"
#include "cpu/source/fp_env.h"
#include "cpu/source/granule.h"
#include "cpu/source/loops.h"
#include "cpu/source/sum_f32.h"

namespace dtcomm::DTCOMM_ISA {

inline const std::uint8_t* element(const void* base, std::size_t at, DType dtype) {
  return static_cast<const std::uint8_t*>(base) + at * size_of(dtype);
}

inline bool is_native_type(DType dtype) { return dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16; }

inline bool has_local(const Combine& call) { return call.local != nullptr || call.residual_in != nullptr; }

// The only term of a call that copies it unchanged, NaN bits included; nullptr if the call computes something.
inline const void* copied_term(const Codec& codec, const Combine& call) {
  if (codec.family != Family::none || call.divisor != 1 || call.residual_in) return nullptr;
  if (call.count == 0 && call.local && call.local_dtype == call.dtype) return call.local;
  if (call.count == 1 && !call.local) return call.payloads[0];
  return nullptr;
}

struct Scratch {
  alignas(kLine) float sum[kLargestGranule];
  alignas(kLine) float term[kLargestGranule];
  alignas(kLine) float decoded[kLargestGranule];
  alignas(kLine) std::uint8_t payload[kSparseGranule * sizeof(float) + kSparseGranule / 8 + kLine];
};
static_assert(kGranule * sizeof(float) + kMostBlocks * 20 <= sizeof(Scratch::payload), "a granule has room");

// local + residual of the granule that starts at element `at`.
inline const float* local_floats(const Combine& call, std::size_t at, std::size_t n, float* scratch) {
  if (!call.residual_in) return widen(call.local_dtype, element(call.local, at, call.local_dtype), n, scratch);
  const auto* residual = reinterpret_cast<const float*>(element(call.residual_in, at, DType::f32));
  if (!call.local) return residual;
  const float* local = widen(call.local_dtype, element(call.local, at, call.local_dtype), n, scratch);
  join(ReduceOp::sum, scratch, local, residual, n);
  return scratch;
}

// The granule's sum, params.floats(n) floats: the memory of a single fp32 term that is not rotated, else scratch.sum.
inline const float* sum_granule(const CodecParams& params, const Combine& call, std::size_t at, std::size_t elements,
                                std::size_t payload_at, Scratch& scratch) {
  const std::size_t n = params.floats(elements);
  const float* sum = nullptr;
  const int terms = call.count + (has_local(call) ? 1 : 0);
  for (int t = 0, payload = 0; t < terms; ++t) {
    float* room = sum ? scratch.term : scratch.sum;
    const bool local = has_local(call) && t == call.position;
    const std::uint8_t* from = local ? nullptr : call.payloads[payload++] + payload_at;
    if (sum && !local && call.op == ReduceOp::sum) {
      add_granule(params, from, n, sum, scratch.sum);
      sum = scratch.sum;
      continue;
    }
    const float* term = local ? local_floats(call, at, elements, room) : floats_of(params, from, n, room);
    if (local && params.codec.rotate) {
      rotate(params.layout.block, term, elements, room);
      term = room;
    }
    if (sum) {
      join(call.op, scratch.sum, sum, term, n);
      sum = scratch.sum;
    } else {
      sum = term;
    }
  }
  if (call.divisor != 1) {
    divide(scratch.sum, sum, n, call.divisor);
    sum = scratch.sum;
  }
  return sum;
}

// residual[i] = error(i) * divisor, unless that is not finite.
template <class Error>
inline void store_residual(const Combine& call, std::size_t at, std::size_t n, const Error& error) {
  const float by = static_cast<float>(call.divisor);
  auto* to = unaligned<float>(call.residual_out) + at;
  const auto* old = call.residual_in ? unaligned<float>(call.residual_in) + at : to;
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const float value = error(i) * by;
    const float before = old[i].value;
    to[i].value = finite(value) ? value : before;
  }
}

// Stores the error of an encoding in the residual; `scratch` has room for a granule.
inline void store_error(const CodecParams& params, const Combine& call, std::size_t at, std::size_t n, const float* sum,
                        const float* decoded, float* scratch) {
  const auto* x = unaligned<float>(sum);
  const auto* y = unaligned<float>(decoded);
  if (!params.codec.rotate) return store_residual(call, at, n, [=](std::size_t i) { return x[i].value - y[i].value; });
  for (std::size_t i = 0; i < params.floats(n); ++i) scratch[i] = sum[i] - decoded[i];
  rotate_back<false>(params.layout.block, scratch, n, scratch, scratch);
  store_residual(call, at, n, [=](std::size_t i) { return scratch[i]; });
}

// The memory of a local term of the granule at element `at`; empty if there is none.
inline PrefetchRange prefetch_range(const void* term, DType dtype, std::size_t at, std::size_t numel) {
  if (!term || at >= numel) return {};
  return {element(term, at, dtype), size_of(dtype), smaller(kLargestGranule, numel - at)};
}

// What remains to be said of a granule's encoding besides its floats.
inline EncodeArgs encode_args(const Combine& call, std::size_t at, std::size_t n) {
  return {call.key, call.offset + at, call.residual_out != nullptr,
          prefetch_range(call.local, call.local_dtype, at + n, call.numel),
          prefetch_range(call.residual_in, DType::f32, at + n, call.numel)};
}

inline void* out_at(const Combine& call, std::size_t at) {
  return call.out ? const_cast<std::uint8_t*>(element(call.out, at, call.out_dtype)) : nullptr;
}

// use(first element, elements, where the granule starts in a payload) for each granule.
template <class Use>
inline void each_granule_of(const Layout& layout, std::size_t numel, const Use& use) {
  std::size_t payload_at = 0;
  for (std::size_t at = 0; at < numel; at += layout.granule) {
    const std::size_t n = smaller(layout.granule, numel - at);
    use(at, n, payload_at);
    payload_at += layout.bytes(n);
  }
}

// The sum of a granule goes to `out`; the residual, of which nothing is left, becomes zero.
inline void reduce_granule(const CodecParams& params, const Combine& call, std::size_t at, std::size_t n,
                           std::size_t payload_at, Scratch& scratch) {
  const float* const sum = sum_granule(params, call, at, n, payload_at, scratch);
  if (call.out) {
    put_terms(params, call.out_dtype, sum, n, out_at(call, at), call.stream_out, scratch.sum, scratch.decoded);
  }
  if (call.residual_out) __builtin_memset(unaligned<float>(call.residual_out) + at, 0, n * sizeof(float));
}

// The encoding of `sum` goes to the payload, its error to the residual, and what it decodes to, to `out`. `copied`
// holds the bytes of the payload where the call copies its only term.
inline void encode_sum(const CodecParams& params, const Combine& call, std::size_t at, std::size_t n,
                       std::size_t payload_at, const float* sum, const std::uint8_t* copied, Scratch& scratch) {
  std::uint8_t* const target = call.payload_out + payload_at;
  std::uint8_t* const payload = call.stream_payload ? scratch.payload : target;
  const EncodeArgs args = encode_args(call, at, n);
  const std::size_t bytes = params.layout.bytes(n);
  const bool with_error =
      call.residual_out && params.family && !params.codec.rotate && params.family->encode_with_error;
  if (with_error) {
    const float* const old = (call.residual_in ? call.residual_in : call.residual_out) + at;
    params.family->encode_with_error(params, sum, n, args, payload,
                                     {static_cast<float>(call.divisor), old, call.residual_out + at});
  } else if (copied) {
    const std::size_t used = params.layout.used(n);
    __builtin_memcpy(payload, copied + at * size_of(call.dtype), used);
    __builtin_memset(payload + used, 0, bytes - used);
  } else {
    encode_granule<false>(params, sum, params.floats(n), args, payload);
  }
  void* const out = out_at(call, at);
  if (call.residual_out && !with_error) {
    const float* const decoded = floats_of(params, payload, params.floats(n), scratch.decoded);
    store_error(params, call, at, n, sum, decoded, scratch.term);
    if (out) put_terms(params, call.out_dtype, decoded, n, out, call.stream_out, scratch.decoded, scratch.term);
  } else if (out) {
    decode_into(params, payload, n, call.out_dtype, out, call.stream_out, scratch.decoded, scratch.term);
  }
  if (call.stream_payload) stream_copy(target, payload, bytes);
}

// Whether a call is the sum of two payloads and nothing else, into fp32 that can be written directly, and the family
// adds pairs.
inline bool adds_pairs(const CodecParams& params, const Combine& call) {
  if (!params.family || !params.family->add_pair || params.codec.rotate || params.codec.spikes) return false;
  const bool only = call.count == 2 && !has_local(call) && !call.residual_out && call.out;
  const bool writable = !call.stream_out || reinterpret_cast<std::uintptr_t>(call.out) % kLine == 0;
  return only && writable && call.divisor == 1 && call.op == ReduceOp::sum && call.out_dtype == DType::f32;
}

// Whether a cast can be written around the cache: nothing has to be read back from the payload.
inline bool writes_around_cache(const CodecParams& params, const Combine& call) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(call.payload_out) % kLine == 0;
  return call.stream_payload && aligned && !params.family && !call.out && !call.residual_out;
}

// Whether the sum is computed in the residual: with error feedback and a sparse codec most of it stays there.
inline bool sums_in_residual(const CodecParams& params, const Combine& call) {
  return params.family && params.family->encode_with_feedback && call.count == 0 && call.local && call.residual_in &&
         call.residual_in == call.residual_out && call.divisor == 1 && !call.out;
}

inline void reduce_granules(const CodecParams& params, const Combine& call, Scratch& scratch) {
  each_granule_of(params.layout, call.numel, [&](std::size_t at, std::size_t n, std::size_t payload_at) {
    reduce_granule(params, call, at, n, payload_at, scratch);
  });
}

inline void add_pairs(const CodecParams& params, const Combine& call, Scratch& scratch) {
  each_granule_of(params.layout, call.numel, [&](std::size_t at, std::size_t n, std::size_t payload_at) {
    float* const to = static_cast<float*>(call.out) + at;
    const bool added = params.family->add_pair(params, call.payloads[0] + payload_at, call.payloads[1] + payload_at, n,
                                               to, call.stream_out);
    if (!added) reduce_granule(params, call, at, n, payload_at, scratch);
  });
}

inline void encode_around_cache(const CodecParams& params, const Combine& call, Scratch& scratch) {
  each_granule_of(params.layout, call.numel, [&](std::size_t at, std::size_t n, std::size_t payload_at) {
    const float* const sum = sum_granule(params, call, at, n, payload_at, scratch);
    encode_granule<true>(params, sum, n, encode_args(call, at, n), call.payload_out + payload_at);
  });
}

inline void encode_in_residual(const CodecParams& params, const Combine& call, Scratch& scratch) {
  each_granule_of(params.layout, call.numel, [&](std::size_t at, std::size_t n, std::size_t payload_at) {
    const void* const local = element(call.local, at, call.local_dtype);
    const bool done = params.family->encode_with_feedback(params, local, call.local_dtype, n, call.residual_out + at,
                                                          encode_args(call, at, n), call.payload_out + payload_at);
    if (done) return;
    const float* const sum = sum_granule(params, call, at, n, payload_at, scratch);
    encode_sum(params, call, at, n, payload_at, sum, nullptr, scratch);
  });
}

inline void encode_granules(const CodecParams& params, const Combine& call, Scratch& scratch) {
  const auto* copied = static_cast<const std::uint8_t*>(copied_term(params.codec, call));
  each_granule_of(params.layout, call.numel, [&](std::size_t at, std::size_t n, std::size_t payload_at) {
    const float* const sum = sum_granule(params, call, at, n, payload_at, scratch);
    encode_sum(params, call, at, n, payload_at, sum, copied, scratch);
  });
}

inline void combine_granules(const Codec& codec, const Combine& call) {
  const CodecParams params(codec, call.dtype);
  Scratch scratch;
  if (!call.payload_out) {
    if (adds_pairs(params, call)) return add_pairs(params, call, scratch);
    return reduce_granules(params, call, scratch);
  }
  if (sums_in_residual(params, call)) return encode_in_residual(params, call, scratch);
  if (writes_around_cache(params, call) && !copied_term(codec, call)) return encode_around_cache(params, call, scratch);
  encode_granules(params, call, scratch);
}

// Runs a call that only copies. Returns false, with nothing done, if the call is not one.
inline bool combine_copy(const Codec& codec, const Combine& call) {
  const auto* from = static_cast<const std::uint8_t*>(copied_term(codec, call));
  if (!from || call.residual_out || (call.out && call.out_dtype != call.dtype)) return false;
  const std::size_t bytes = call.numel * size_of(call.dtype);
  if (call.payload_out && call.out && from != call.out) {
    constexpr std::size_t kPart = 16384;  // both copies from L1, in one pass over memory
    for (std::size_t at = 0; at < bytes; at += kPart) {
      const std::size_t n = smaller(kPart, bytes - at);
      copy(call.payload_out + at, from + at, n, call.stream_payload);
      copy(static_cast<std::uint8_t*>(call.out) + at, from + at, n, call.stream_out);
    }
  } else {
    if (call.payload_out) copy(call.payload_out, from, bytes, call.stream_payload);
    if (call.out) copy(call.out, from, bytes, call.stream_out);
  }
  return true;
}

// Runs an uncompressed fp32 sum. Returns false, with nothing done, if the call is not one.
inline bool combine_sum(const Codec& codec, const Combine& call) {
  const int terms = call.count + (call.local ? 1 : 0);
  if (codec.family != Family::none || call.dtype != DType::f32 || call.op != ReduceOp::sum) return false;
  if (terms < 2 || terms > kMaxTerms || call.residual_in || call.residual_out) return false;
  if ((call.local && call.local_dtype != DType::f32) || (call.out && call.out_dtype != DType::f32)) return false;
  const Targets to{reinterpret_cast<float*>(call.payload_out), static_cast<float*>(call.out),
                   call.payload_out && call.stream_payload, call.out && call.stream_out};
  if (!streams_together(to)) return false;
  const float* in[kMaxTerms];
  for (int t = 0, payload = 0; t < terms; ++t) {
    const bool local = call.local && t == call.position;
    in[t] = local ? static_cast<const float*>(call.local) : reinterpret_cast<const float*>(call.payloads[payload++]);
  }
  sum_terms(in, terms, call.numel, call.divisor, to);
  return true;
}

inline void combine(const Codec& codec, const Combine& call) {
  if (call.numel == 0) return;
  const ScopedFpEnv environment;
  const bool exact = codec.family == Family::none && is_native_type(call.dtype);
  const bool whole = combine_copy(codec, call) || (!exact && combine_sum(codec, call));
  if (!whole && exact) combine_native(call);
  if (!whole && !exact) combine_granules(codec, call);
  if (call.payload_out && codec.family == Family::none) {
    const std::size_t used = call.numel * size_of(call.dtype);
    __builtin_memset(call.payload_out + used, 0, (kAlign - used % kAlign) % kAlign);
  }
  if (call.stream_payload || call.stream_out) stream_fence();
}

inline void decode(const Codec& codec, const std::uint8_t* payload, std::size_t numel, DType dtype, void* out,
                   DType out_dtype, bool stream) {
  if (numel == 0) return;
  const ScopedFpEnv environment;
  if (codec.family == Family::none && out_dtype == dtype) {
    copy(out, payload, numel * size_of(dtype), stream);
  } else {
    const CodecParams params(codec, dtype);
    Scratch scratch;
    each_granule_of(params.layout, numel, [&](std::size_t at, std::size_t n, std::size_t payload_at) {
      void* to = const_cast<std::uint8_t*>(element(out, at, out_dtype));
      decode_into(params, payload + payload_at, n, out_dtype, to, stream, scratch.decoded, scratch.term);
    });
  }
  if (stream) stream_fence();
}

}  // namespace dtcomm::DTCOMM_ISA
