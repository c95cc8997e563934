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
  alignas(kLine) float sum[kLargestBlock];
  alignas(kLine) float term[kLargestBlock];
  alignas(kLine) float decoded[kLargestBlock];
  alignas(kLine) std::uint8_t payload[kSparseGranule * sizeof(float) + kSparseGranule / 8 + kLine];
};
static_assert(kSparseGranule <= kLargestBlock, "a granule of every codec has room");
static_assert(kGranule * sizeof(float) + kGranule / kSmallestBlock * 20 <= sizeof(Scratch::payload), "in bytes, too");

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
  return {element(term, at, dtype), size_of(dtype), smaller(kLargestBlock, numel - at)};
}

// Whether a call is the sum of two payloads and nothing else, into fp32 that can be written directly.
inline bool adds_two_payloads(const Combine& call) {
  const bool only = call.count == 2 && !has_local(call) && !call.payload_out && !call.residual_out && call.out;
  const bool writable = !call.stream_out || reinterpret_cast<std::uintptr_t>(call.out) % kLine == 0;
  return only && writable && call.divisor == 1 && call.op == ReduceOp::sum && call.out_dtype == DType::f32;
}

inline void combine_granules(const Codec& codec, const Combine& call) {
  const CodecParams params(codec, call.dtype);
  const auto* copied = static_cast<const std::uint8_t*>(copied_term(codec, call));
  // Write around the cache if nothing has to be read back from the payload.
  const bool aligned = reinterpret_cast<std::uintptr_t>(call.payload_out) % kLine == 0;
  const bool direct = call.stream_payload && aligned && !params.family && !copied && !call.out && !call.residual_out;
  // With error feedback and a sparse codec most of the sum stays in the residual, so it is computed there.
  const bool in_place = params.family && params.family->encode_with_feedback && call.payload_out && call.count == 0 &&
                        call.local && call.residual_in && call.residual_in == call.residual_out && call.divisor == 1 &&
                        !call.out;
  const bool plain = params.family && !codec.rotate;
  const bool add_pair = plain && !codec.spikes && params.family->add_pair && adds_two_payloads(call);
  Scratch scratch;
  std::size_t payload_at = 0;
  for (std::size_t at = 0; at < call.numel; at += params.layout.granule) {
    const std::size_t n = smaller(params.layout.granule, call.numel - at);
    const std::size_t bytes = params.layout.bytes(n);
    if (add_pair && params.family->add_pair(params, call.payloads[0] + payload_at, call.payloads[1] + payload_at, n,
                                            static_cast<float*>(call.out) + at, call.stream_out)) {
      payload_at += bytes;
      continue;
    }
    const EncodeArgs args{call.key, call.offset + at, call.residual_out != nullptr,
                          prefetch_range(call.local, call.local_dtype, at + n, call.numel),
                          prefetch_range(call.residual_in, DType::f32, at + n, call.numel)};
    std::uint8_t* const target = call.payload_out ? call.payload_out + payload_at : nullptr;
    if (in_place && params.family->encode_with_feedback(params, element(call.local, at, call.local_dtype),
                                                        call.local_dtype, n, call.residual_out + at, args, target)) {
      payload_at += bytes;
      continue;
    }
    const float* sum = sum_granule(params, call, at, n, payload_at, scratch);
    void* out = call.out ? const_cast<std::uint8_t*>(element(call.out, at, call.out_dtype)) : nullptr;
    if (!call.payload_out) {
      if (out) put_terms(params, call.out_dtype, sum, n, out, call.stream_out, scratch.sum, scratch.decoded);
      if (call.residual_out) __builtin_memset(unaligned<float>(call.residual_out) + at, 0, n * sizeof(float));
      payload_at += bytes;
      continue;
    }
    if (direct) {
      encode_granule<true>(params, sum, n, args, target);
      payload_at += bytes;
      continue;
    }
    std::uint8_t* payload = call.stream_payload ? scratch.payload : target;
    const bool with_error = call.residual_out && plain && params.family->encode_with_error;
    if (with_error) {
      const float* old = (call.residual_in ? call.residual_in : call.residual_out) + at;
      params.family->encode_with_error(params, sum, n, args, payload,
                                       {static_cast<float>(call.divisor), old, call.residual_out + at});
    } else if (copied) {
      const std::size_t used = params.layout.used(n);
      __builtin_memcpy(payload, copied + at * size_of(call.dtype), used);
      __builtin_memset(payload + used, 0, bytes - used);
    } else {
      encode_granule<false>(params, sum, params.floats(n), args, payload);
    }
    if (call.residual_out && !with_error) {
      const float* decoded = floats_of(params, payload, params.floats(n), scratch.decoded);
      store_error(params, call, at, n, sum, decoded, scratch.term);
      if (out) put_terms(params, call.out_dtype, decoded, n, out, call.stream_out, scratch.decoded, scratch.term);
    } else if (out) {
      decode_into(params, payload, n, call.out_dtype, out, call.stream_out, scratch.decoded, scratch.term);
    }
    if (call.stream_payload) stream_copy(target, payload, bytes);
    payload_at += bytes;
  }
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
    std::size_t payload_at = 0;
    for (std::size_t at = 0; at < numel; at += params.layout.granule) {
      const std::size_t n = smaller(params.layout.granule, numel - at);
      void* to = const_cast<std::uint8_t*>(element(out, at, out_dtype));
      decode_into(params, payload + payload_at, n, out_dtype, to, stream, scratch.decoded, scratch.term);
      payload_at += params.layout.bytes(n);
    }
  }
  if (stream) stream_fence();
}

}  // namespace dtcomm::DTCOMM_ISA
