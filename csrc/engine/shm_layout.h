// The memory one rank shares with the others of its communicator: what it says (op headers, flags, progress,
// failure) and what it has encoded (slots of boxes). Only the owner writes it, so no two ranks write one line.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/error.h"
#include "engine/emulated_link.h"

namespace dtcomm {

constexpr std::uint64_t kAreaMagic = 0x6474636f6d6d0006ull;
constexpr std::size_t kLine = 64;
constexpr int kSlots = 8;     // pieces that can be in flight
constexpr int kOpRing = 64;   // op headers kept: a peer can be at most kSlots operations behind
constexpr int kOpText = 160;  // bytes of an operation's description
constexpr std::size_t kPage = 4096;

// "Box b of the piece with sequence number seq is complete." `operation` is the fingerprint of the operation it
// belongs to: ranks that disagree see it on the line they read anyway.
struct alignas(kLine) Flag {
  std::atomic<std::uint64_t> seq{0};
  std::atomic<std::uint64_t> operation{0};
  std::atomic<std::uint32_t> checksum{0};  // CRC32C of the payload, where the plan asks for it
};

// What a rank says about its operation `number`; `number` is stored last.
struct alignas(kLine) OpHeader {
  std::atomic<std::uint64_t> number{0};
  std::atomic<std::uint64_t> fingerprint{0};
  // Tensors that lie in memory the peers can map (dtcomm.empty): slot in the owner's region table and byte offset.
  std::atomic<std::int64_t> region{-1};
  std::atomic<std::uint64_t> region_id{0};
  std::atomic<std::uint64_t> region_offset{0};
  std::atomic<std::uint64_t> address{0};  // of the tensor in its owner, where peers may pull it from there
  char text[kOpText] = {};
};

struct alignas(kLine) Failure {
  std::atomic<std::uint32_t> state{0};  // 0 none, 1 being written, 2 readable
  ErrorKind kind = ErrorKind::none;
  std::int32_t culprit = -1;
  char text[372] = {};
};

struct AreaHead {
  std::uint64_t magic = 0;
  std::uint64_t token = 0;
  std::uint64_t bytes = 0;
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint32_t max_boxes = 0;
  std::int32_t pid = 0;
  alignas(kLine) std::atomic<std::uint64_t> done{0};  // pieces this rank has finished, in order
  // While asleep: the rank waited for, and when this was last confirmed (monotonic ns). Lets a timeout name the
  // rank at the end of a chain of waits.
  alignas(kLine) std::atomic<std::int32_t> waiting_for{-1};
  std::atomic<std::uint64_t> waiting_since{0};
  std::atomic<std::uint32_t> closed{0};                 // this rank has destroyed its communicator
  alignas(kLine) std::atomic<std::uint64_t> bounce{0};  // the line that probes of the round trip move to and fro
  Failure failure;
  OpHeader ops[kOpRing];
};

// Where things lie in an area. A slot's stride is skewed, so that slots of one rank, or of two ranks whose areas
// happen to be equally aligned, do not compete for the same cache sets.
struct AreaLayout {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint32_t max_boxes = 0;
  std::size_t slot_bytes = 0;
  bool link = false;  // an emulated one: every box has a stamp for each reader

  std::size_t flags_offset() const { return round_up(sizeof(AreaHead), kLine); }
  std::size_t stamps_offset() const { return flags_offset() + sizeof(Flag) * kSlots * max_boxes; }
  std::size_t stamps() const { return link ? std::size_t{kSlots} * max_boxes * ranks : 0; }
  std::size_t data_offset() const {
    return round_up(stamps_offset() + sizeof(Stamp) * stamps(), kPage) + kSkew * (rank % 16);
  }
  std::size_t slot_stride() const { return slot_bytes + kSlotSkew; }
  std::size_t bytes() const { return round_up(data_offset() + slot_stride() * kSlots, kPage); }

  static constexpr std::size_t kSkew = 276 * 1024;
  static constexpr std::size_t kSlotSkew = 4096 + 128;
  static constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
  }
};

// One rank's area as another (or itself) sees it. `runtime/local` points flags and done at delayed copies.
struct PeerView {
  AreaHead* head = nullptr;
  Flag* flags = nullptr;
  std::atomic<std::uint64_t>* done = nullptr;
  Stamp* stamps = nullptr;  // by flag and reader; null without a link
  std::uint8_t* data = nullptr;
  std::size_t slot_stride = 0;

  std::uint8_t* slot(std::uint64_t piece) const { return data + (piece % kSlots) * slot_stride; }
};

inline PeerView view_of(void* base, const AreaLayout& layout) {
  auto* bytes = static_cast<std::uint8_t*>(base);
  PeerView view;
  view.head = reinterpret_cast<AreaHead*>(bytes);
  view.flags = reinterpret_cast<Flag*>(bytes + layout.flags_offset());
  view.done = &view.head->done;
  if (layout.link) view.stamps = reinterpret_cast<Stamp*>(bytes + layout.stamps_offset());
  view.data = bytes + layout.data_offset();
  view.slot_stride = layout.slot_stride();
  return view;
}

}  // namespace dtcomm
