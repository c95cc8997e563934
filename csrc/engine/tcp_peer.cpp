#include "engine/tcp_peer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <system_error>

#include "engine/process_page.h"

namespace dtcomm {
namespace {

// The numbers travel between ranks.
enum Kind : std::uint32_t { kBox = 1, kDone = 2, kHeader = 3, kWaiting = 4, kFailure = 5, kClosed = 6 };

// So many finished pieces may be unsaid: a peer that waits for a slot waits for one that was used long before.
constexpr std::uint64_t kDoneUnsaid = 2;
static_assert(2 * kDoneUnsaid <= kSlots, "slots come free only when it is said");
constexpr std::uint64_t kHeadersSaid = 8;  // a peer is at most so many operations behind
static_assert(sizeof(Failure::text) >= kOpText, "one buffer takes either");

void* reserve(std::size_t bytes) {
  // Only what the peer sends is ever touched.
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "memory for a peer's messages");
  return memory;
}

}  // namespace

Remote::Remote(int fd, const AreaLayout& layout, int reader)
    : layout_(layout), reader_(static_cast<std::size_t>(reader)), memory_(nullptr), stream_(fd) {
  memory_ = reserve(layout_.bytes());
  view_ = view_of(memory_, layout_);
  new (view_.head) AreaHead;
  for (std::size_t i = 0; i < std::size_t{layout_.max_boxes} * kSlots; ++i) new (view_.flags + i) Flag;
  for (std::size_t i = 0; i < layout_.stamps(); ++i) new (view_.stamps + i) Stamp;
}

Remote::~Remote() { munmap(memory_, layout_.bytes()); }

void Remote::send_box(std::size_t index, const Flag& flag, std::uint64_t first_ns, const std::uint8_t* data,
                      std::size_t slot_offset, std::size_t bytes) {
  FrameHead head{kBox, static_cast<std::uint32_t>(bytes)};
  head.words = {flag.seq.load(std::memory_order_relaxed), flag.operation.load(std::memory_order_relaxed),
                static_cast<std::uint64_t>(index) << 32 | flag.checksum.load(std::memory_order_relaxed), first_ns,
                slot_offset};
  stream_.put(head, data);
}

void Remote::send_done(std::uint64_t pieces) {
  if (pieces < done_said_ + kDoneUnsaid) return;
  done_said_ = pieces;
  FrameHead head{kDone};
  head.words[0] = pieces;
  stream_.put(head, nullptr);
}

void Remote::send_headers(const AreaHead& own, std::uint64_t number) {
  std::uint64_t next = headers_said_ + 1;
  if (number >= kHeadersSaid) next = std::max(next, number - kHeadersSaid + 1);
  for (; next <= number; ++next) {
    const OpHeader& header = own.ops[next % kOpRing];
    if (header.number.load(std::memory_order_relaxed) != next) continue;
    FrameHead head{kHeader};
    head.words[0] = next;
    head.words[1] = header.fingerprint.load(std::memory_order_relaxed);
    stream_.put(head, std::string(header.text, strnlen(header.text, kOpText - 1)));
  }
  headers_said_ = std::max(headers_said_, number);
}

void Remote::send_waiting(int rank) {
  FrameHead head{kWaiting};
  head.words[0] = static_cast<std::uint64_t>(rank);
  stream_.put(head, nullptr);
}

void Remote::send_failure(const Failure& failure) {
  FrameHead head{kFailure};
  head.words[0] = static_cast<std::uint64_t>(failure.kind);
  head.words[1] = static_cast<std::uint64_t>(failure.culprit);
  stream_.put(head, std::string(failure.text, strnlen(failure.text, sizeof failure.text - 1)));
}

void Remote::send_closed() { stream_.put(FrameHead{kClosed}, nullptr); }

bool Remote::receive() { return stream_.receive(*this); }

std::uint8_t* Remote::place(const FrameHead& head) {
  auto* const text = reinterpret_cast<std::uint8_t*>(text_);
  switch (head.kind) {
    case kBox: {
      const std::uint64_t seq = head.words[0];
      const std::uint64_t index = head.words[2] >> 32;
      const std::uint64_t at = head.words[4];
      if (seq == 0 || index >= std::uint64_t{layout_.max_boxes} * kSlots || index % kSlots != (seq - 1) % kSlots) {
        return nullptr;
      }
      if (at > layout_.slot_bytes || head.bytes > layout_.slot_bytes - at) return nullptr;
      return view_.slot(seq - 1) + at;
    }
    case kHeader:
      return head.bytes < kOpText ? text : nullptr;
    case kFailure:
      return head.bytes < sizeof text_ ? text : nullptr;
    case kDone:
    case kWaiting:
    case kClosed:
      return head.bytes == 0 ? text : nullptr;
    default:
      return nullptr;
  }
}

void Remote::arrived(const FrameHead& head) {
  AreaHead& area = *view_.head;
  switch (head.kind) {
    case kBox: {
      const std::size_t index = head.words[2] >> 32;
      if (view_.stamps) {
        Stamp& stamp = view_.stamps[index * layout_.ranks + reader_];
        stamp.first.store(head.words[3], std::memory_order_relaxed);
        stamp.seq.store(head.words[0], std::memory_order_release);
      }
      Flag& flag = view_.flags[index];
      flag.operation.store(head.words[1], std::memory_order_relaxed);
      flag.checksum.store(static_cast<std::uint32_t>(head.words[2]), std::memory_order_relaxed);
      flag.seq.store(head.words[0], std::memory_order_release);
      break;
    }
    case kDone:
      area.done.store(head.words[0], std::memory_order_release);
      break;
    case kHeader: {
      OpHeader& header = area.ops[head.words[0] % kOpRing];
      header.number.store(0, std::memory_order_release);
      header.fingerprint.store(head.words[1], std::memory_order_relaxed);
      std::memcpy(header.text, text_, head.bytes);
      header.text[head.bytes] = 0;
      header.number.store(head.words[0], std::memory_order_release);
      break;
    }
    case kWaiting:
      area.waiting_for.store(static_cast<std::int32_t>(head.words[0]), std::memory_order_relaxed);
      area.waiting_since.store(now_ns(), std::memory_order_release);  // by this host's clock
      break;
    case kFailure: {
      Failure& failure = area.failure;
      std::uint32_t none = 0;
      if (!failure.state.compare_exchange_strong(none, 1)) break;
      failure.kind = static_cast<ErrorKind>(head.words[0]);
      failure.culprit = static_cast<std::int32_t>(head.words[1]);
      std::memcpy(failure.text, text_, head.bytes);
      failure.text[head.bytes] = 0;
      failure.state.store(2, std::memory_order_release);
      break;
    }
    case kClosed:
      area.closed.store(1, std::memory_order_release);
      break;
    default:
      break;
  }
}

}  // namespace dtcomm
