// The two entries of the kernel table (cpu/kernels.h says what they mean).
#pragma once

#include "cpu/kernels.h"
#include "cpu/source/combine_native_types.h"
#include "cpu/source/fp_env.h"
#include "cpu/source/granule.h"
#include "cpu/source/sum_f32.h"

namespace dtcomm::DTCOMM_ISA {

inline const std::uint8_t* element(const void* base, std::size_t at, DType dtype) {
  return static_cast<const std::uint8_t*>(base) + at * size_of(dtype);
}

inline bool exact_type(DType dtype) { return dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16; }

inline bool has_local(const Combine& call) { return call.local != nullptr || call.residual_in != nullptr; }

// One term, of the payload's own type and unchanged: its bits are copied, a NaN's included.
inline const void* verbatim(const Codec& codec, const Combine& call) {
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

// local + residual of the granule at element `at`.
inline const float* local_floats(const Combine& call, std::size_t at, std::size_t n, float* scratch) {
  if (!call.residual_in) return widen(call.local_dtype, element(call.local, at, call.local_dtype), n, scratch);
  const auto* residual = reinterpret_cast<const float*>(element(call.residual_in, at, DType::f32));
  if (!call.local) return residual;
  const float* local = widen(call.local_dtype, element(call.local, at, call.local_dtype), n, scratch);
  join(ReduceOp::sum, scratch, local, residual, n);
  return scratch;
}

// The granule's sum, plan.floats(n) floats: memory of a lone fp32 term that is not rotated, otherwise scratch.sum.
inline const float* sum_granule(const Plan& plan, const Combine& call, std::size_t at, std::size_t elements,
                                std::size_t payload_at, Scratch& scratch) {
  const std::size_t n = plan.floats(elements);
  const float* sum = nullptr;
  const int terms = call.count + (has_local(call) ? 1 : 0);
  for (int t = 0, payload = 0; t < terms; ++t) {
    float* room = sum ? scratch.term : scratch.sum;
    const bool local = has_local(call) && t == call.position;
    const std::uint8_t* from = local ? nullptr : call.payloads[payload++] + payload_at;
    if (sum && !local && call.op == ReduceOp::sum) {
      add_granule(plan, from, n, sum, scratch.sum);
      sum = scratch.sum;
      continue;
    }
    const float* term = local ? local_floats(call, at, elements, room) : floats_of(plan, from, n, room);
    if (local && plan.codec.rotate) {
      rotate(plan.layout.block, term, elements, room);
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

// residual = error(i) * divisor, except where that is no number.
template <class Error>
inline void keep_residual(const Combine& call, std::size_t at, std::size_t n, const Error& error) {
  const float by = static_cast<float>(call.divisor);
  auto* to = cells<float>(call.residual_out) + at;
  const auto* old = call.residual_in ? cells<float>(call.residual_in) + at : to;
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) {
    const float owed = error(i) * by;
    const float before = old[i].value;
    to[i].value = finite(owed) ? owed : before;
  }
}

// The error of an encoding; `scratch` has room for it.
inline void keep_error(const Plan& plan, const Combine& call, std::size_t at, std::size_t n, const float* sum,
                       const float* decoded, float* scratch) {
  const auto* x = cells<float>(sum);
  const auto* y = cells<float>(decoded);
  if (!plan.codec.rotate) return keep_residual(call, at, n, [=](std::size_t i) { return x[i].value - y[i].value; });
  for (std::size_t i = 0; i < plan.floats(n); ++i) scratch[i] = sum[i] - decoded[i];
  rotate_back<false>(plan.layout.block, scratch, n, scratch, scratch);
  keep_residual(call, at, n, [=](std::size_t i) { return scratch[i]; });
}

// A local term of the granule at element `at`, where there is one.
inline Ahead ahead_of(const void* term, DType dtype, std::size_t at, std::size_t numel) {
  if (!term || at >= numel) return {};
  return {element(term, at, dtype), size_of(dtype), smaller(kLargestBlock, numel - at)};
}

// The sum of two payloads and nothing else, into fp32 that can be written as it comes.
inline bool adds_two_payloads(const Combine& call) {
  const bool only = call.count == 2 && !has_local(call) && !call.payload_out && !call.residual_out && call.out;
  const bool writable = !call.stream_out || reinterpret_cast<std::uintptr_t>(call.out) % kLine == 0;
  return only && writable && call.divisor == 1 && call.op == ReduceOp::sum && call.out_dtype == DType::f32;
}

inline void combine_granules(const Codec& codec, const Combine& call) {
  const Plan plan(codec, call.dtype);
  const auto* copied = static_cast<const std::uint8_t*>(verbatim(codec, call));
  // Straight past the cache, where nothing is to be read back from the payload.
  const bool aligned = reinterpret_cast<std::uintptr_t>(call.payload_out) % kLine == 0;
  const bool direct = call.stream_payload && aligned && !plan.family && !copied && !call.out && !call.residual_out;
  // A sum that is mostly owed, as little of it is sent, is taken where the residual lies.
  const bool in_place = plan.family && plan.family->owe && call.payload_out && call.count == 0 && call.local &&
                        call.residual_in && call.residual_in == call.residual_out && call.divisor == 1 && !call.out;
  const bool plain = plan.family && !codec.rotate && !codec.spikes;
  const bool pair = plain && plan.family->pair && adds_two_payloads(call);
  Scratch scratch;
  std::size_t payload_at = 0;
  for (std::size_t at = 0; at < call.numel; at += plan.layout.granule) {
    const std::size_t n = smaller(plan.layout.granule, call.numel - at);
    const std::size_t bytes = plan.layout.bytes(n);
    if (pair && plan.family->pair(plan, call.payloads[0] + payload_at, call.payloads[1] + payload_at, n,
                                  static_cast<float*>(call.out) + at, call.stream_out)) {
      payload_at += bytes;
      continue;
    }
    const Encoding how{call.key, call.offset + at, call.residual_out != nullptr,
                       ahead_of(call.local, call.local_dtype, at + n, call.numel),
                       ahead_of(call.residual_in, DType::f32, at + n, call.numel)};
    std::uint8_t* const target = call.payload_out ? call.payload_out + payload_at : nullptr;
    if (in_place && plan.family->owe(plan, element(call.local, at, call.local_dtype), call.local_dtype, n,
                                     call.residual_out + at, how, target)) {
      payload_at += bytes;
      continue;
    }
    const float* sum = sum_granule(plan, call, at, n, payload_at, scratch);
    void* out = call.out ? const_cast<std::uint8_t*>(element(call.out, at, call.out_dtype)) : nullptr;
    if (!call.payload_out) {
      if (out) put_terms(plan, call.out_dtype, sum, n, out, call.stream_out, scratch.sum, scratch.decoded);
      if (call.residual_out) __builtin_memset(cells<float>(call.residual_out) + at, 0, n * sizeof(float));
      payload_at += bytes;
      continue;
    }
    if (direct) {
      encode_granule<true>(plan, sum, n, how, target);
      payload_at += bytes;
      continue;
    }
    std::uint8_t* payload = call.stream_payload ? scratch.payload : target;
    if (copied) {
      const std::size_t used = plan.layout.used(n);
      __builtin_memcpy(payload, copied + at * size_of(call.dtype), used);
      __builtin_memset(payload + used, 0, bytes - used);
    } else {
      encode_granule<false>(plan, sum, plan.floats(n), how, payload);
    }
    if (call.residual_out && plain && plan.family->lost) {
      const float* old = (call.residual_in ? call.residual_in : call.residual_out) + at;
      plan.family->lost(plan, payload, n, sum, static_cast<float>(call.divisor), old, call.residual_out + at);
      if (out) decode_into(plan, payload, n, call.out_dtype, out, call.stream_out, scratch.decoded, scratch.term);
    } else if (call.residual_out) {
      const float* decoded = floats_of(plan, payload, plan.floats(n), scratch.decoded);
      keep_error(plan, call, at, n, sum, decoded, scratch.term);
      if (out) put_terms(plan, call.out_dtype, decoded, n, out, call.stream_out, scratch.decoded, scratch.term);
    } else if (out) {
      decode_into(plan, payload, n, call.out_dtype, out, call.stream_out, scratch.decoded, scratch.term);
    }
    if (call.stream_payload) stream_copy(target, payload, bytes);
    payload_at += bytes;
  }
}

// Copies of the whole range: nothing to compute, nothing lost. False where the call is not one.
inline bool combine_copy(const Codec& codec, const Combine& call) {
  const auto* from = static_cast<const std::uint8_t*>(verbatim(codec, call));
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

// The plain fp32 sum. False where the call is not one.
inline bool combine_sum(const Codec& codec, const Combine& call) {
  const int terms = call.count + (call.local ? 1 : 0);
  if (codec.family != Family::none || call.dtype != DType::f32 || call.op != ReduceOp::sum) return false;
  if (terms < 2 || terms > kMostTerms || call.residual_in || call.residual_out) return false;
  if ((call.local && call.local_dtype != DType::f32) || (call.out && call.out_dtype != DType::f32)) return false;
  const Targets to{reinterpret_cast<float*>(call.payload_out), static_cast<float*>(call.out),
                   call.payload_out && call.stream_payload, call.out && call.stream_out};
  if (!streams_together(to)) return false;
  const float* in[kMostTerms];
  for (int t = 0, payload = 0; t < terms; ++t) {
    const bool local = call.local && t == call.position;
    in[t] = local ? static_cast<const float*>(call.local) : reinterpret_cast<const float*>(call.payloads[payload++]);
  }
  sum_terms(in, terms, call.numel, call.divisor, to);
  return true;
}

inline void combine(const Codec& codec, const Combine& call) {
  if (call.numel == 0) return;
  const Environment environment;
  const bool exact = codec.family == Family::none && exact_type(call.dtype);
  const bool whole = combine_copy(codec, call) || (!exact && combine_sum(codec, call));
  if (!whole && exact) combine_exact(call);
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
  const Environment environment;
  if (codec.family == Family::none && out_dtype == dtype) {
    copy(out, payload, numel * size_of(dtype), stream);
  } else {
    const Plan plan(codec, dtype);
    Scratch scratch;
    std::size_t payload_at = 0;
    for (std::size_t at = 0; at < numel; at += plan.layout.granule) {
      const std::size_t n = smaller(plan.layout.granule, numel - at);
      void* to = const_cast<std::uint8_t*>(element(out, at, out_dtype));
      decode_into(plan, payload + payload_at, n, out_dtype, to, stream, scratch.decoded, scratch.term);
      payload_at += plan.layout.bytes(n);
    }
  }
  if (stream) stream_fence();
}

}  // namespace dtcomm::DTCOMM_ISA
