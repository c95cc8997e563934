// The shared region: memory that one rank owns and the other ranks of its communicator map. The owner publishes in it
// what it is doing (op headers, flags, progress, failure) and the payloads that it has encoded. Only the owner writes,
// so no two ranks write the same cache line.
//
// Terms:
//   piece  A part of an operation. Operations are cut into pieces so that encoding, transfer and reduction overlap.
//          Pieces are numbered through all operations of a communicator ("sequence number").
//   slot   Memory for the payloads of one piece. There are kSlots of them, used in turn.
//   box    The place of one payload in a slot. A program numbers the boxes of every rank.
//   flag   Tells peers that a box of a piece is complete.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/error.h"
#include "engine/emulated_link.h"
#include "engine/offer.h"

namespace dtcomm {

constexpr std::uint64_t kRegionMagic = 0x6474636f6d6d0009ull;
constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kPage = 4096;
constexpr int kSlots = 8;               // pieces that can be in flight
constexpr int kOpRing = 64;             // op headers kept; a peer is at most kSlots operations behind
constexpr int kOpText = 160;            // bytes of an operation's description
constexpr int kSizeClasses = 128;       // for which a Tuner chooses variants
constexpr int kTrials = 256;            // whose times are kept
constexpr std::size_t kCandidates = 8;  // that a stage of trials compares at most

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// Box b of the piece with sequence number `seq` - 1 is complete. `operation` is the fingerprint of the operation that
// it belongs to: ranks that run different operations see it in the line that they read anyway.
struct alignas(kCacheLine) BoxFlag {
  std::atomic<std::uint64_t> seq{0};
  std::atomic<std::uint64_t> operation{0};
  std::atomic<std::uint32_t> checksum{0};  // CRC32C of the payload, if the plan has checksums
};

// What a rank announces about its operation `number`; `number` is stored last.
struct alignas(kCacheLine) OpHeader {
  std::atomic<std::uint64_t> number{0};
  std::atomic<std::uint64_t> fingerprint{0};
  // The input, if it lies in memory that peers can map (dtcomm.empty): its SharedTensorLocation; slot -1 otherwise.
  std::atomic<std::int64_t> tensor_slot{-1};
  std::atomic<std::uint64_t> tensor_id{0};
  std::atomic<std::uint64_t> tensor_offset{0};
  std::atomic<std::uint64_t> address{0};  // of the input in its owner, if peers may read it there; 0 otherwise
  char text[kOpText] = {};
};

// The error with which a rank's communicator failed, for the other ranks.
struct alignas(kCacheLine) FailureRecord {
  std::atomic<std::uint32_t> state{0};  // 0 none, 1 being written, 2 readable
  ErrorKind kind = ErrorKind::none;
  std::int32_t failed_rank = -1;
  char text[372] = {};
};

// The time of a message is measured over so many before it: from the start of the first one to its own start.
constexpr std::size_t kMessagesTimed = 2;

// When this rank ran an operation that was a trial of a Tuner; `operation` is stored last.
struct TrialTimes {
  std::atomic<std::uint64_t> operation{0};
  std::atomic<std::uint64_t> begin_ns{0};
  std::atomic<std::uint64_t> end_ns{0};
  std::atomic<std::uint64_t> previous_begin_ns{0};  // of a message: when that kMessagesTimed before it began
  std::atomic<std::uint64_t> busy_ns{0};
  std::atomic<bool> shared_tensor{false};  // the input lies in memory that peers can map
};

// What the tuners of the ranks tell each other; see tuner.h.
struct alignas(kCacheLine) TunerBoard {
  TrialTimes trials[kTrials];
  std::atomic<std::uint64_t> decisions[kSizeClasses] = {};  // of rank 0
};

struct RegionHeader {
  std::uint64_t magic = 0;
  std::uint64_t token = 0;
  std::uint64_t bytes = 0;
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint32_t max_boxes = 0;
  alignas(kCacheLine) std::atomic<std::uint64_t> pieces_done{0};  // that this rank has finished, in order
  // While this rank sleeps: the rank that its last operation waits for, and when it last looked (monotonic ns). With
  // these a timeout names the rank at the end of a chain of waits.
  alignas(kCacheLine) std::atomic<std::int32_t> waiting_for{-1};
  std::atomic<std::uint64_t> waiting_since{0};
  std::atomic<std::uint32_t> closed{0};  // this rank has destroyed its communicator
  FailureRecord failure;
  OpHeader ops[kOpRing];
  alignas(kCacheLine) OfferWords offer;
};

// Where things lie in a region. The data of different ranks, and consecutive slots, start at different offsets, so that
// slots which are used at the same time do not compete for the same cache sets.
struct RegionLayout {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint32_t max_boxes = 0;
  std::size_t slot_bytes = 0;
  bool emulates_link = false;  // then every box has a delivery stamp for each reader

  std::size_t flags() const { return std::size_t{kSlots} * max_boxes; }
  std::size_t stamps() const { return emulates_link ? flags() * ranks : 0; }
  std::size_t board_offset() const { return round_up(sizeof(RegionHeader), kCacheLine); }
  std::size_t flags_offset() const { return board_offset() + sizeof(TunerBoard); }
  std::size_t stamps_offset() const { return flags_offset() + sizeof(BoxFlag) * flags(); }
  std::size_t data_offset() const {
    return round_up(stamps_offset() + sizeof(DeliveryStamp) * stamps(), kPage) + kRankSkew * (rank % 16);
  }
  std::size_t slot_stride() const { return slot_bytes + kSlotSkew; }
  std::size_t bytes() const { return round_up(data_offset() + slot_stride() * kSlots, kPage); }

  static constexpr std::size_t kRankSkew = 276 * 1024;
  static constexpr std::size_t kSlotSkew = 4096 + 128;
};

// Which bytes of its slot the last payload that arrived for a flag filled.
struct ArrivedBytes {
  std::size_t slot_offset = 0;
  std::size_t bytes = 0;
};

// One rank's region as a rank (itself or another) sees it. SimulatedWorld points `flags` and `pieces_done` at delayed
// copies.
struct PeerView {
  RegionHeader* header = nullptr;
  TunerBoard* board = nullptr;
  BoxFlag* flags = nullptr;  // [box * kSlots + slot]
  std::atomic<std::uint64_t>* pieces_done = nullptr;
  DeliveryStamp* stamps = nullptr;        // [flag * ranks + reader]; null without an emulated link
  const ArrivedBytes* arrived = nullptr;  // by flag; null for ranks that share memory
  std::uint8_t* data = nullptr;
  std::size_t slot_stride = 0;

  std::uint8_t* slot(std::uint64_t seq) const { return data + (seq % kSlots) * slot_stride; }
};

// The view of a region that lies at `base`.
PeerView view_of(void* base, const RegionLayout& layout);
// The same, of memory that is zeroed and not yet a region: constructs its header, flags and stamps.
PeerView construct_region(void* base, const RegionLayout& layout);

}  // namespace dtcomm
