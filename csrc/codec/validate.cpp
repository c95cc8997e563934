#include "codec/validate.h"

#include "codec/sparse.h"

namespace dtcomm {

namespace {

Status check_block(const Codec& codec) {
  if (codec.scale != Scale::bf16 && codec.scale != Scale::fp32)
    return Status::error("codec: scale must be bf16 or fp32");
  const bool power = codec.block != 0 && (codec.block & (codec.block - 1)) == 0;
  if (!power || codec.block < kSmallestBlock || codec.block > kLargestBlock) {
    return Status::error("codec: block must be a power of two from 16 to 4096");
  }
  return Status();
}

Status check_integer(const Codec& codec) {
  if (codec.bits < 2 || codec.bits > 8) return Status::error("codec: integer codes have 2 to 8 bits");
  return check_block(codec);
}

Status check_reproducible(const Codec& codec) {
  if (codec.bits != 16 && codec.bits != 32) return Status::error("codec: exact integers have 16 or 32 bits");
  return check_block(codec);
}

Status check_mx(const Codec& codec) {
  if (codec.element != Element::e4m3 && codec.element != Element::e5m2 && codec.element != Element::e2m1) {
    return Status::error("codec: elements of mx are e4m3, e5m2 or e2m1");
  }
  if (codec.block != 32) return Status::error("codec: blocks of mx have 32 elements");
  return Status();
}

Status check_nvfp4(const Codec& codec) {
  if (codec.element != Element::e2m1) return Status::error("codec: elements of nvfp4 are e2m1");
  if (codec.block != kNvfp4Block) return Status::error("codec: blocks of nvfp4 have 16 elements");
  return Status();
}

Status check_variable(const Codec& codec) {
  if (codec.bits < 2 || codec.bits > 7) return Status::error("codec: codes of intv have 2 to 7 bits in the mean");
  return check_block(codec);
}

Status check_sparse(const Codec& codec) {
  if (codec.kept < 1 || codec.kept > kSparseGranule) return Status::error("codec: 1 to 4096 of 4096 elements are kept");
  switch (codec.element) {
    case Element::bf16:
    case Element::fp16:
    case Element::fp32:
      return Status();
    case Element::integer:
      if (codec.block > kValueGranule)
        return Status::error("codec: blocks of nested values have at most 1024 elements");
      return check_integer(codec);
    default:
      return Status::error("codec: values are bf16, fp16, fp32 or integer");
  }
}

Status check_positions(const std::uint8_t* list, std::size_t count, std::size_t elements) {
  std::uint32_t before = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t at = position_at(list, i);
    if (at >= elements) {
      return Status::error("position " + std::to_string(i) + " is " + std::to_string(at) + " of " +
                           std::to_string(elements) + " elements");
    }
    if (i != 0 && at <= before) {
      return Status::error("position " + std::to_string(i) + " is " + std::to_string(at) + " after " +
                           std::to_string(before) + ": not ascending");
    }
    before = at;
  }
  return Status();
}

Status check_bitmap(const std::uint8_t* bitmap, std::size_t count, std::size_t elements) {
  std::size_t set = 0;
  for (std::size_t i = 0; i < elements / 8; ++i) set += static_cast<std::size_t>(__builtin_popcount(bitmap[i]));
  for (std::size_t i = elements / 8 * 8; i < elements; ++i) set += bit_at(bitmap, i) ? 1 : 0;
  if (set == count) return Status();
  return Status::error("the bitmap has " + std::to_string(set) + " bits set for " + std::to_string(count) + " values");
}

}  // namespace

Status check_codec(const Codec& codec) {
  if (codec.symmetric > 1 || codec.stochastic > 1) return Status::error("codec: symmetric and stochastic are 0 or 1");
  if (codec.rotate > 1 || codec.spikes > 1) return Status::error("codec: rotate and spikes are 0 or 1");
  const bool integer = codec.family == Family::integer;
  if (codec.spikes && !integer) return Status::error("codec: only integer codecs keep spikes");
  if (codec.rotate && !integer && codec.family != Family::sign && codec.family != Family::mx) {
    return Status::error("codec: only integer, mx and sign codecs rotate");
  }
  const bool sparse = codec.family == Family::topk || codec.family == Family::randk;
  if (!sparse && codec.kept != 0) return Status::error("codec: only sparse codecs keep a part of the elements");
  switch (codec.family) {
    case Family::none:
    case Family::fp16:
      return codec.stochastic ? Status::error("codec: none and fp16 have no stochastic rounding") : Status();
    case Family::bf16:
      return Status();
    case Family::integer:
      return check_integer(codec);
    case Family::float8:
      if (codec.element != Element::e4m3 && codec.element != Element::e5m2 && codec.element != Element::e3m4) {
        return Status::error("codec: elements of float8 are e4m3, e5m2 or e3m4");
      }
      return check_block(codec);
    case Family::mx:
      return check_mx(codec);
    case Family::nvfp4:
      return check_nvfp4(codec);
    case Family::variable:
      return check_variable(codec);
    case Family::sign:
      return check_block(codec);
    case Family::exact:
      return check_reproducible(codec);
    case Family::topk:
    case Family::randk:
      return check_sparse(codec);
  }
  return Status::error("codec: unknown family");
}

Status check_payload(const Codec& codec, const std::uint8_t* payload, std::size_t numel) {
  if (codec.family != Family::topk) return Status();
  const Layout layout = layout_of(codec, DType::f32);
  for (std::size_t granule = 0, at = 0; at < numel; ++granule, at += layout.granule) {
    const std::size_t elements = numel - at < layout.granule ? numel - at : layout.granule;
    const std::size_t count = layout.kept_of(elements);
    const std::uint8_t* positions = payload + layout.head + layout.values(elements);
    const Status status = layout.position_bits == 1 ? check_bitmap(positions, count, elements)
                                                    : check_positions(positions, count, elements);
    if (!status.ok()) return Status::error("granule " + std::to_string(granule) + ": " + status.message());
    payload += layout.bytes(elements);
  }
  return Status();
}

}  // namespace dtcomm
