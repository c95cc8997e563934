#include "codec/codec.h"

#include "codec/layout.h"

namespace dtcomm {

std::size_t granule_elements(const Codec& codec) { return layout_of(codec, DType::f32).granule; }

std::size_t wire_bytes(const Codec& codec, std::size_t numel, DType dtype) {
  const Layout layout = layout_of(codec, dtype);
  const std::size_t whole = numel / layout.granule, rest = numel % layout.granule;
  return whole * layout.bytes(layout.granule) + (rest ? layout.bytes(rest) : 0);
}

const char* why_invalid(const Codec& codec) {
  for (std::uint8_t byte : codec.reserved) {
    if (byte != 0) return "codec: reserved bytes must be zero";
  }
  switch (codec.family) {
    case Family::none:
    case Family::fp16:
    case Family::bf16:
      return nullptr;
    case Family::integer:
      break;
    default:
      return "codec: unknown family";
  }
  if (codec.bits != 8) return "codec: integer codes have 8 bits";
  if (codec.scale != Scale::bf16 && codec.scale != Scale::fp32) return "codec: scale must be bf16 or fp32";
  if (codec.symmetric > 1 || codec.stochastic > 1) return "codec: symmetric and stochastic are 0 or 1";
  const bool power = codec.block != 0 && (codec.block & (codec.block - 1)) == 0;
  if (!power || codec.block < kSmallestBlock || codec.block > kLargestBlock) {
    return "codec: block must be a power of two from 16 to 4096";
  }
  return nullptr;
}

}  // namespace dtcomm
