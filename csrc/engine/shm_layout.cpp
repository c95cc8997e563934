#include "engine/shm_layout.h"

#include <new>

namespace dtcomm {

PeerView view_of(void* base, const RegionLayout& layout) {
  auto* bytes = static_cast<std::uint8_t*>(base);
  PeerView view;
  view.header = reinterpret_cast<RegionHeader*>(bytes);
  view.board = reinterpret_cast<TunerBoard*>(bytes + layout.board_offset());
  view.flags = reinterpret_cast<BoxFlag*>(bytes + layout.flags_offset());
  view.pieces_done = &view.header->pieces_done;
  if (layout.emulates_link) view.stamps = reinterpret_cast<DeliveryStamp*>(bytes + layout.stamps_offset());
  view.data = bytes + layout.data_offset();
  view.slot_stride = layout.slot_stride();
  return view;
}

PeerView construct_region(void* base, const RegionLayout& layout) {
  const PeerView view = view_of(base, layout);
  new (view.header) RegionHeader;
  new (view.board) TunerBoard;
  for (std::size_t i = 0; i < layout.flags(); ++i) new (view.flags + i) BoxFlag;
  for (std::size_t i = 0; i < layout.stamps(); ++i) new (view.stamps + i) DeliveryStamp;
  return view;
}

}  // namespace dtcomm
