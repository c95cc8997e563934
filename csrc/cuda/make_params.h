// From a call to what its threads are handed. Host code alone: csrc/tests/device uses it too.
#pragma once

#include "cuda/families.h"
#include "cuda/params.cuh"

namespace dtcomm::cuda {

inline unsigned log2_of(std::size_t power) {
  unsigned shift = 0;
  while (power >> (shift + 1)) ++shift;
  return shift;
}

inline bool is_wide(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % kAlign == 0; }

inline bool exact_type(DType dtype) { return dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16; }

inline DType wire_of(const Codec& codec, DType dtype) {
  if (codec.family == Family::fp16) return DType::f16;
  return codec.family == Family::bf16 ? DType::bf16 : dtype;
}

inline bool is_cast(const Codec& codec) {
  return codec.family == Family::none || codec.family == Family::fp16 || codec.family == Family::bf16;
}

// One term of Family::none, in the payload's own type and unchanged: its bits are copied, a NaN's included. Where the
// copy would need a second pass (a residual, an output of another type) it is a sum of one term instead.
inline const void* verbatim(const Codec& codec, const Combine& call) {
  if (codec.family != Family::none || call.divisor != 1 || call.residual_in || call.residual_out) return nullptr;
  if (call.out && call.out_dtype != call.dtype) return nullptr;
  if (call.count == 0 && call.local && call.local_dtype == call.dtype) return call.local;
  if (call.count == 1 && !call.local) return call.payloads[0];
  return nullptr;
}

// call.numel is at least 1.
inline Call plan(const Codec& codec, const Combine& call, const std::uint8_t* const* table) {
  const Layout layout = layout_of(codec, call.dtype);
  const bool has_local = call.local || call.residual_in;
  const int terms = call.count + (has_local ? 1 : 0);
  // Only a lone term that nothing happens to keeps its NaNs' bits: the local tensor, or a cast's payload.
  const bool joins = terms > 1 || call.divisor != 1 || (call.local && call.residual_in);
  Call to = {};
  if (call.count <= kNearPayloads) {
    for (int t = 0; t < call.count; ++t) to.near[t] = call.payloads[t];
  }
  to.table = table;
  to.count = call.count;
  to.position = call.position;
  to.local = call.local;
  to.residual_in = call.residual_in;
  to.residual_out = call.residual_out;
  to.payload_out = call.payload_out;
  to.out = call.out;
  to.local_dtype = call.local_dtype;
  to.out_dtype = call.out_dtype;
  to.op = call.op;
  to.has_local = has_local;
  to.divides = call.divisor != 1;
  to.joins = joins;
  to.canonical = joins || call.payload_out || (!has_local && !is_cast(codec));
  to.local_wide = is_wide(call.local);
  to.residual_wide = is_wide(call.residual_in) && is_wide(call.residual_out);
  to.out_wide = is_wide(call.out);
  to.divisor = static_cast<float>(call.divisor);
  to.granule_shift = log2_of(layout.granule);
  to.last = (call.numel - 1) / layout.granule;
  to.granule_bytes = layout.bytes(layout.granule);
  to.key = call.key;
  to.offset = call.offset;
  to.whole = shape_of(layout, layout.granule);
  to.tail = shape_of(layout, call.numel - to.last * layout.granule);
  return to;
}

template <class Blocks>
Blocks blocks_of(const Codec& codec, const IntegerRules& rules) {
  Blocks blocks;
  blocks.rules = rules;
  blocks.codec = codec;
  blocks.block_shift = log2_of(codec.block);
  return blocks;
}

template <class Use>
auto with_integer(const Codec& codec, const Use& use) {
  const IntegerRules rules = integer_rules(codec);
  const bool plain = codec.symmetric && !codec.stochastic && !codec.rotate && !codec.spikes;
  if (plain && codec.bits == 8 && codec.block == 32) return use(blocks_of<Integer<8, 4, true>>(codec, rules));
  if (plain && codec.bits == 8 && codec.block == 128) return use(blocks_of<Integer<8, 16, true>>(codec, rules));
  if (plain && codec.bits == 4 && codec.block == 32) return use(blocks_of<Integer<4, 4, true>>(codec, rules));
  if (plain && codec.bits == 4 && codec.block == 128) return use(blocks_of<Integer<4, 16, true>>(codec, rules));
  return use(blocks_of<AnyInteger>(codec, rules));
}

template <class Use>
auto with_float8(const Codec& codec, const Use& use) {
  const IntegerRules rules = float8_rules(codec);
  if (codec.element == Element::e5m2) return use(blocks_of<Float8<E5m2, 0, false>>(codec, rules));
  if (!codec.stochastic && codec.block == 32) return use(blocks_of<Float8<E4m3, 4, true>>(codec, rules));
  if (!codec.stochastic && codec.block == 128) return use(blocks_of<Float8<E4m3, 16, true>>(codec, rules));
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
  const std::size_t kept = layout.kept_of(n), last = (kept - 1) / kGranule * kGranule;
  return {static_cast<std::uint32_t>(kept), static_cast<std::uint32_t>(last),
          static_cast<std::uint32_t>(layout.head + layout.values(n)), shape_of(nested, kept - last)};
}

inline Sparse sparse_family(const Codec& codec, const Call& call) {
  const Layout layout = layout_of(codec, DType::f32);
  const Codec values = values_of(codec);
  const Layout nested = layout_of(values, DType::f32);
  Sparse family = {};
  family.codec = codec;
  family.integer = blocks_of<AnyInteger>(values, integer_rules(values));
  family.wire = wire_of(values, DType::f32);
  family.head = static_cast<std::uint32_t>(layout.head);
  family.position_bits = static_cast<std::uint32_t>(layout.position_bits);
  family.nested_bytes = static_cast<std::uint32_t>(nested.bytes(kGranule));
  family.nested = shape_of(nested, kGranule);
  family.whole = part_of(layout, nested, kSparseGranule);
  family.tail = part_of(layout, nested, call.tail.n);
  return family;
}

// use(family) for the family, as a type, that serves a dense codec.
template <class Use>
auto with_family(const Codec& codec, DType dtype, const Use& use) {
  switch (codec.family) {
    case Family::integer:
      return with_integer(codec, use);
    case Family::float8:
      return with_float8(codec, use);
    case Family::mx:
      return with_mx(codec, use);
    case Family::sign:
      return use(blocks_of<Sign>(codec, IntegerRules()));
    default: {
      const DType wire = wire_of(codec, dtype);
      if (wire == DType::f32) return use(Cast<DType::f32>());
      return wire == DType::f16 ? use(Cast<DType::f16>()) : use(Cast<DType::bf16>());
    }
  }
}

}  // namespace dtcomm::cuda
