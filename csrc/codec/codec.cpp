#include "codec/codec.h"

#include "codec/layout.h"

namespace dtcomm {

std::size_t granule_elements(const Codec& codec) { return layout_of(codec, DType::f32).granule; }

std::size_t wire_bytes(const Codec& codec, std::size_t numel, DType dtype) {
  const Layout layout = layout_of(codec, dtype);
  const std::size_t whole = numel / layout.granule, rest = numel % layout.granule;
  return whole * layout.bytes(layout.granule) + (rest ? layout.bytes(rest) : 0);
}

}  // namespace dtcomm
