#include "codec/codec.h"

#include "codec/layout.h"

namespace dtcomm {

std::size_t granule_elements(const Codec& codec) { return layout_of(codec, DType::f32).granule; }

std::size_t wire_bytes(const Codec& codec, std::size_t numel, DType dtype) {
  const Layout layout = layout_of(codec, dtype);
  const std::size_t whole = numel / layout.granule, rest = numel % layout.granule;
  return whole * layout.bytes(layout.granule) + (rest ? layout.bytes(rest) : 0);
}

namespace {

const char* why_bad_block(const Codec& codec) {
  if (codec.scale != Scale::bf16 && codec.scale != Scale::fp32) return "codec: scale must be bf16 or fp32";
  const bool power = codec.block != 0 && (codec.block & (codec.block - 1)) == 0;
  if (!power || codec.block < kSmallestBlock || codec.block > kLargestBlock) {
    return "codec: block must be a power of two from 16 to 4096";
  }
  return nullptr;
}

const char* why_bad_integer(const Codec& codec) {
  if (codec.bits < 2 || codec.bits > 8) return "codec: integer codes have 2 to 8 bits";
  return why_bad_block(codec);
}

const char* why_bad_exact(const Codec& codec) {
  if (codec.bits != 16 && codec.bits != 32) return "codec: exact integers have 16 or 32 bits";
  return why_bad_block(codec);
}

const char* why_bad_mx(const Codec& codec) {
  if (codec.element != Element::e4m3 && codec.element != Element::e5m2 && codec.element != Element::e2m1) {
    return "codec: elements of mx are e4m3, e5m2 or e2m1";
  }
  return codec.block == 32 ? nullptr : "codec: blocks of mx have 32 elements";
}

const char* why_bad_sparse(const Codec& codec) {
  if (codec.kept < 1 || codec.kept > kSparseGranule) return "codec: 1 to 4096 of 4096 elements are kept";
  switch (codec.element) {
    case Element::bf16:
    case Element::fp16:
    case Element::fp32:
      return nullptr;
    case Element::integer:
      if (codec.block > kGranule) return "codec: blocks of nested values have at most 1024 elements";
      return why_bad_integer(codec);
    default:
      return "codec: values are bf16, fp16, fp32 or integer";
  }
}

}  // namespace

const char* why_invalid(const Codec& codec) {
  if (codec.symmetric > 1 || codec.stochastic > 1) return "codec: symmetric and stochastic are 0 or 1";
  if (codec.rotate > 1 || codec.spikes > 1) return "codec: rotate and spikes are 0 or 1";
  const bool integer = codec.family == Family::integer;
  if (codec.spikes && !integer) return "codec: only integer codecs keep spikes";
  if (codec.rotate && !integer && codec.family != Family::sign && codec.family != Family::mx) {
    return "codec: only integer, mx and sign codecs rotate";
  }
  const bool sparse = codec.family == Family::topk || codec.family == Family::randk;
  if (!sparse && codec.kept != 0) return "codec: only sparse codecs keep a part of the elements";
  switch (codec.family) {
    case Family::none:
    case Family::fp16:
    case Family::bf16:
      return nullptr;
    case Family::integer:
      return why_bad_integer(codec);
    case Family::float8:
      if (codec.element != Element::e4m3 && codec.element != Element::e5m2) {
        return "codec: elements of float8 are e4m3 or e5m2";
      }
      return why_bad_block(codec);
    case Family::mx:
      return why_bad_mx(codec);
    case Family::sign:
      return why_bad_block(codec);
    case Family::exact:
      return why_bad_exact(codec);
    case Family::topk:
    case Family::randk:
      return why_bad_sparse(codec);
    default:
      return "codec: unknown family";
  }
}

}  // namespace dtcomm
