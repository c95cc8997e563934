// Makes the parameters of a kernel from a call, and chooses the codec family that serves it. Host code only.
#pragma once

#include "cuda/families.h"
#include "cuda/params.cuh"

namespace dtcomm::cuda {

inline unsigned log2_of(std::size_t power) {
  unsigned shift = 0;
  while (power >> (shift + 1)) ++shift;
  return shift;
}

inline bool is_aligned16(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % kAlign == 0; }

inline bool is_native_sum_type(DType dtype) {
  return dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16;
}

inline DType wire_of(const Codec& codec, DType dtype) {
  if (codec.family == Family::fp16) return DType::f16;
  return codec.family == Family::bf16 ? DType::bf16 : dtype;
}

inline bool is_cast(const Codec& codec) {
  return codec.family == Family::none || codec.family == Family::fp16 || codec.family == Family::bf16;
}

// The only term of the call where it is of Family::none, of the payload's type and unchanged, so that its bits can be
// copied, those of NaNs included; else nullptr. A call that would need a second pass (for a residual or an output of
// another type) is a sum of one term instead.
inline const void* single_verbatim_term(const Codec& codec, const Combine& call) {
  if (codec.family != Family::none || call.divisor != 1 || call.residual_in || call.residual_out) return nullptr;
  if (call.out && call.out_dtype != call.dtype) return nullptr;
  if (call.count == 0 && call.local && call.local_dtype == call.dtype) return call.local;
  if (call.count == 1 && !call.local) return call.payloads[0];
  return nullptr;
}

// The parameters of a call over at least one element. `encodes`: the kernel writes a payload, whose address it may set
// itself later.
inline KernelParams make_params(const Codec& codec, const Combine& call, const std::uint8_t* const* table,
                                bool encodes) {
  const Layout layout = layout_of(codec, call.dtype);
  const bool has_local = call.local || call.residual_in;
  const int terms = call.count + (has_local ? 1 : 0);
  // Only a single term that no arithmetic changes keeps the bits of its NaNs: the local tensor, or a cast's payload.
  const bool is_computed = terms > 1 || call.divisor != 1 || (call.local && call.residual_in);
  KernelParams params = {};
  if (call.count <= kInlinePayloads) {
    for (int t = 0; t < call.count; ++t) params.payloads[t] = call.payloads[t];
  }
  params.table = table;
  params.count = call.count;
  params.position = call.position;
  params.local = call.local;
  params.residual_in = call.residual_in;
  params.residual_out = call.residual_out;
  params.payload_out = call.payload_out;
  params.out = call.out;
  params.local_dtype = call.local_dtype;
  params.out_dtype = call.out_dtype;
  params.op = call.op;
  params.has_local = has_local;
  params.divides = call.divisor != 1;
  params.is_computed = is_computed;
  params.canonical_nan = is_computed || encodes || (!has_local && !is_cast(codec));
  params.local_aligned = is_aligned16(call.local);
  params.residual_aligned = is_aligned16(call.residual_in) && is_aligned16(call.residual_out);
  params.out_aligned = is_aligned16(call.out);
  params.divisor = static_cast<float>(call.divisor);
  params.granule_shift = log2_of(layout.granule);
  params.last = (call.numel - 1) / layout.granule;
  params.granule_bytes = layout.bytes(layout.granule);
  params.key = call.key;
  params.offset = call.offset;
  params.whole = granule_shape_of(layout, layout.granule);
  params.tail = granule_shape_of(layout, call.numel - params.last * layout.granule);
  return params;
}

template <class Blocks>
Blocks blocks_of(const Codec& codec, const IntegerRules& rules) {
  Blocks blocks;
  blocks.rules = rules;
  blocks.codec = codec;
  blocks.block_shift = log2_of(codec.block);
  return blocks;
}

// Whether warps process its blocks by themselves.
inline bool fits_warp(const Codec& codec) { return codec.block <= kWarp * kVec8; }

// Whether an integer codec has no option but its bits and its block.
inline bool is_plain(const Codec& codec) {
  return codec.symmetric && !codec.stochastic && !codec.rotate && !codec.spikes;
}

template <class Use>
auto with_integer(const Codec& codec, const Use& use) {
  const IntegerRules rules = integer_rules(codec);
  const auto with = [&](auto family) { return use(blocks_of<decltype(family)>(codec, rules)); };
  constexpr auto kPlain = IntegerOptions::plain;
  const bool small = codec.block == 32, large = codec.block == 128;
  if (codec.symmetric && !codec.stochastic && !codec.rotate && codec.spikes && codec.bits == 4 && fits_warp(codec)) {
    return with(Integer<4, 0, IntegerOptions::spikes>());
  }
  if (!is_plain(codec)) return with(AnyInteger());
  if (codec.bits == 8 && small) return with(Integer<8, 4, kPlain>());
  if (codec.bits == 8 && large) return with(Integer<8, 16, kPlain>());
  if (codec.bits == 4 && small) return with(Integer<4, 4, kPlain>());
  if (codec.bits == 4 && large) return with(Integer<4, 16, kPlain>());
  return with(AnyInteger());
}

template <class Use>
auto with_float8(const Codec& codec, const Use& use) {
  const IntegerRules rules = float8_rules(codec);
  const bool specialized = !codec.stochastic && fits_warp(codec);
  if (codec.element == Element::e5m2) return use(blocks_of<Float8<E5m2, 0, false>>(codec, rules));
  if (codec.element == Element::e3m4) {
    return specialized ? use(blocks_of<Float8<E3m4, 0, true>>(codec, rules))
                       : use(blocks_of<Float8<E3m4, 0, false>>(codec, rules));
  }
  if (specialized && codec.block == 32) return use(blocks_of<Float8<E4m3, 4, true>>(codec, rules));
  if (specialized && codec.block == 128) return use(blocks_of<Float8<E4m3, 16, true>>(codec, rules));
  return use(blocks_of<Float8<E4m3, 0, false>>(codec, rules));
}

template <class Use>
auto with_mx(const Codec& codec, const Use& use) {
  const bool rotated = codec.rotate != 0;
  if (codec.element == Element::e4m3) return use(Mx<E4m3>{rotated});
  return codec.element == Element::e5m2 ? use(Mx<E5m2>{rotated}) : use(Mx<E2m1>{rotated});
}

inline bool is_sparse(const Codec& codec) { return codec.family == Family::topk || codec.family == Family::randk; }

inline Part part_of(const Layout& layout, const Layout& nested, std::size_t n) {
  const std::size_t kept = layout.kept_of(n), last = (kept - 1) / kValueGranule * kValueGranule;
  return {static_cast<std::uint32_t>(kept), static_cast<std::uint32_t>(last),
          static_cast<std::uint32_t>(layout.head + layout.values(n)), granule_shape_of(nested, kept - last)};
}

inline Sparse sparse_family(const Codec& codec, const KernelParams& call) {
  const Layout layout = layout_of(codec, DType::f32);
  const Codec values = values_of(codec);
  const Layout nested = layout_of(values, DType::f32);
  Sparse family = {};
  family.codec = codec;
  family.integer = blocks_of<AnyInteger>(values, integer_rules(values));
  family.wire = wire_of(values, DType::f32);
  family.head = static_cast<std::uint32_t>(layout.head);
  family.position_bits = static_cast<std::uint32_t>(layout.position_bits);
  family.nested_bytes = static_cast<std::uint32_t>(nested.bytes(kValueGranule));
  family.nested = granule_shape_of(nested, kValueGranule);
  family.whole = part_of(layout, nested, kSparseGranule);
  family.tail = part_of(layout, nested, call.tail.n);
  return family;
}

// use(family) with the family, as a type, that serves a dense codec.
template <class Use>
auto with_family(const Codec& codec, DType dtype, const Use& use) {
  switch (codec.family) {
    case Family::integer:
      return with_integer(codec, use);
    case Family::float8:
      return with_float8(codec, use);
    case Family::mx:
      return with_mx(codec, use);
    case Family::nvfp4:
      return use(Nvfp4{});
    case Family::variable:
      return use(Variable{log2_of(codec.block)});
    case Family::sign:
      return use(blocks_of<Sign>(codec, IntegerRules()));
    case Family::none:
    case Family::fp16:
    case Family::bf16: {
      const DType wire = wire_of(codec, dtype);
      if (wire == DType::f32) return use(Cast<DType::f32>());
      return wire == DType::f16 ? use(Cast<DType::f16>()) : use(Cast<DType::bf16>{codec.stochastic != 0});
    }
    case Family::topk:
    case Family::randk:
    case Family::exact:
      break;
  }
  __builtin_trap();  // no dense family of this device; can_run said so
}

}  // namespace dtcomm::cuda
