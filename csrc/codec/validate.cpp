#include "codec/validate.h"

#include "codec/sparse.h"

namespace dtcomm {

namespace {

std::string why_bad_list(const std::uint8_t* list, std::size_t count, std::size_t elements) {
  std::uint32_t before = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t at = position_at(list, i);
    if (at >= elements) {
      return "position " + std::to_string(i) + " is " + std::to_string(at) + " of " + std::to_string(elements) +
             " elements";
    }
    if (i != 0 && at <= before) {
      return "position " + std::to_string(i) + " is " + std::to_string(at) + " after " + std::to_string(before) +
             ": not ascending";
    }
    before = at;
  }
  return {};
}

std::string why_bad_bitmap(const std::uint8_t* bitmap, std::size_t count, std::size_t elements) {
  std::size_t set = 0;
  for (std::size_t i = 0; i < elements / 8; ++i) set += static_cast<std::size_t>(__builtin_popcount(bitmap[i]));
  for (std::size_t i = elements / 8 * 8; i < elements; ++i) set += bit_at(bitmap, i) ? 1 : 0;
  if (set == count) return {};
  return "the bitmap has " + std::to_string(set) + " bits set for " + std::to_string(count) + " values";
}

}  // namespace

std::string why_corrupt(const Codec& codec, const std::uint8_t* payload, std::size_t numel) {
  if (codec.family != Family::topk) return {};
  const Layout layout = layout_of(codec, DType::f32);
  for (std::size_t granule = 0, at = 0; at < numel; ++granule, at += layout.granule) {
    const std::size_t elements = numel - at < layout.granule ? numel - at : layout.granule;
    const std::size_t count = layout.kept_of(elements);
    const std::uint8_t* positions = payload + layout.head + layout.values(elements);
    const std::string why = layout.position_bits == 1 ? why_bad_bitmap(positions, count, elements)
                                                      : why_bad_list(positions, count, elements);
    if (!why.empty()) return "granule " + std::to_string(granule) + ": " + why;
    payload += layout.bytes(elements);
  }
  return {};
}

}  // namespace dtcomm
