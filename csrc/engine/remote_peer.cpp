// Threads: the driver of the communicator (operation_queue.h) receives and sends. A thread that fails sends the
// failure, one that closes sends the goodbye, and one that makes connections anew calls restore(), end_stream() and
// give_up(). Each holds RemotePeerSet's mutex. Under it nothing blocks, and no other lock of the engine is taken.
//
// Owners: this object owns the copy of the peer's region and, in its StreamBundle, the sockets; UcxWorker owns the
// channel of UCX. The payloads that are sent stay in this rank's slots: is_sending() says which of them are still read.
//
// End of the peer: it closes (kClosed), it fails (kFailure), or its connection ends (has_ended()). What it has said
// last counts only when everything that it sent before has arrived, so that an operation which it completed also
// completes here. Operations end where FailureMonitor finds one of the three; they are not ended here.
#include "engine/remote_peer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "engine/process_page.h"

namespace dtcomm {
namespace {

// Finished pieces between two messages about them: a peer that waits for a slot waits for one that was used long ago.
constexpr std::uint64_t kDoneInterval = 2;
static_assert(2 * kDoneInterval <= kSlots, "slots become free only when the peer learns of it");
constexpr std::uint64_t kHeadersSent = 8;  // a peer is at most this many operations behind
// How long the failure of a peer waits for payloads that it sent before. They may never arrive.
constexpr std::uint64_t kFailureWaitNs = 1000 * 1000 * 1000;
static_assert(FrameSink::kMaxText >= kOpText && FrameSink::kMaxText >= sizeof(FailureRecord::text));

void* reserve(std::size_t bytes) {
  // Not reserved: only the pages that the peer sends something for are ever touched.
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "memory for the messages of a peer on another host");
  return memory;
}

// Whether a word is a rank, or -1 for none.
bool is_rank_or_none(std::uint64_t word, std::uint32_t ranks) { return word + 1 <= ranks; }

}  // namespace

RemotePeer::RemotePeer(const std::vector<int>& fds, const RegionLayout& layout, const RegionHeader& own)
    : layout_(layout), own_(own), memory_(nullptr), arrived_(layout.flags()), sockets_(fds, layout.flags(), *this) {
  // The word of a frame that describes a part holds a delivery stamp otherwise.
  if (sockets_.uses_parts() && layout.emulates_link) {
    throw std::invalid_argument("several connections over an emulated link");
  }
  memory_ = reserve(layout_.bytes());
  view_ = construct_region(memory_, layout_);
  view_.arrived = arrived_.data();
}

RemotePeer::~RemotePeer() { munmap(memory_, layout_.bytes()); }

void RemotePeer::connect(UcxWorker& worker, const std::string& address) {
  // A channel that has ended is not made anew, and a peer that is connected through one needs no other sockets.
  if (sockets_.uses_parts()) throw std::invalid_argument("several connections beside UCX");
  channel_ = &worker.connect(layout_.rank, own_.rank, address, *this);
  channel_->enqueue(FrameHeader{kHello}, nullptr);
  channel_->flush();
}

// May be called without the mutex. A stream may be made anew meanwhile: then the answer was right a moment ago, and
// FailureMonitor asks twice before it reports a peer as lost.
bool RemotePeer::has_ended() const {
  if (view_.header->closed.load(std::memory_order_acquire)) return false;
  if (!channel_->ended() && !sockets_.ended()) return false;
  if (!says_goodbye_.load(std::memory_order_acquire)) return !sockets_.may_be_restored();
  // A peer that has said goodbye makes no connection anew: what has not arrived by now does not. It may end its socket
  // while another channel still delivers what it sent.
  return channel_->ended();
}

bool RemotePeer::is_cut_off() const {
  return sockets_.ended() && sockets_.may_be_restored() && !says_goodbye_.load(std::memory_order_acquire) &&
         !view_.header->closed.load(std::memory_order_acquire);
}

const std::string& RemotePeer::end_reason() const {
  return sockets_.ended() ? sockets_.end_reason() : channel_->end_reason();
}

void RemotePeer::send_box(std::size_t index, const BoxFlag& flag, std::uint64_t first_ns, const std::uint8_t* data,
                          std::size_t slot_offset, std::size_t bytes) {
  FrameHeader frame{kBox, static_cast<std::uint32_t>(bytes)};
  frame.words = {flag.seq.load(std::memory_order_relaxed), flag.operation.load(std::memory_order_relaxed),
                 static_cast<std::uint64_t>(index) << 32 | flag.checksum.load(std::memory_order_relaxed), first_ns,
                 slot_offset};
  channel_->enqueue(frame, data);
  ++boxes_sent_;
}

// A peer that sends parts learns of every piece: it keeps a part, to send it again, until the piece is done.
void RemotePeer::send_pieces_done(std::uint64_t pieces) {
  if (pieces < pieces_done_sent_ + (sockets_.uses_parts() ? 1 : kDoneInterval)) return;
  pieces_done_sent_ = pieces;
  FrameHeader frame{kDone};
  frame.words[0] = pieces;
  channel_->enqueue(frame, nullptr);
}

// A peer compares headers with the operation that it is in, so those of much older ones are left out.
void RemotePeer::send_headers(std::uint64_t number) {
  std::uint64_t next = headers_sent_ + 1;
  if (number >= kHeadersSent) next = std::max(next, number - kHeadersSent + 1);
  for (; next <= number; ++next) {
    const OpHeader& header = own_.ops[next % kOpRing];
    if (header.number.load(std::memory_order_relaxed) != next) continue;  // a later one has taken its place
    FrameHeader frame{kHeader};
    frame.words[0] = next;
    frame.words[1] = header.fingerprint.load(std::memory_order_relaxed);
    channel_->enqueue(frame, std::string(header.text, strnlen(header.text, kOpText - 1)));
  }
  headers_sent_ = std::max(headers_sent_, number);
}

// This and the two below go over a socket also where payloads have another channel: the kernel delivers what it has
// taken even if this rank no longer drives that channel.
void RemotePeer::send_waiting_for(int rank) {
  FrameHeader frame{kWaiting};
  frame.words[0] = static_cast<std::uint64_t>(rank);
  sockets_.enqueue(frame, nullptr);
}

void RemotePeer::send_failure() {
  const FailureRecord& failure = own_.failure;
  FrameHeader frame{kFailure};
  frame.words[0] = static_cast<std::uint64_t>(failure.kind);
  frame.words[1] = static_cast<std::uint64_t>(failure.failed_rank);
  frame.words[2] = boxes_sent_;  // it may overtake payloads, which go another way; see read_last_words()
  failure_sent_ = true;
  sockets_.enqueue(frame, std::string(failure.text, strnlen(failure.text, sizeof failure.text - 1)));
}

void RemotePeer::send_closed() {
  FrameHeader frame{kClosed};
  frame.words[0] = boxes_sent_;
  closed_sent_ = true;
  sockets_.enqueue(frame, nullptr);
}

bool RemotePeer::flush() {
  bool queued = sockets_.flush();
  // The comparison saves a second flush of the sockets at every poll.
  if (channel_ != &sockets_) queued |= channel_->flush();
  return queued;
}

bool RemotePeer::receive(std::size_t stream) {
  sockets_.receive(stream);
  read_last_words();
  return handle_ended_streams();
}

bool RemotePeer::handle_ended_streams() {
  const StreamBundle::Ends ends = sockets_.handle_ends();
  if (ends.control_moved) repeat_short_frames();
  return ends.any;
}

// Sends over the present stream of short frames what the one before it may have lost.
void RemotePeer::repeat_short_frames() {
  FrameHeader frame{kDone};
  frame.words[0] = pieces_done_sent_;
  sockets_.enqueue(frame, nullptr);
  const std::uint64_t last = headers_sent_;
  // The last ones only: send_headers() leaves out the others as well.
  headers_sent_ -= std::min(last, kHeadersSent);
  send_headers(last);
  if (failure_sent_) send_failure();
  if (closed_sent_) send_closed();
}

std::vector<StreamBundle::LostStream> RemotePeer::lost_streams() const {
  // A rank that closes still needs a stream for what it has not sent.
  const bool has_sent_all = !sockets_.ended() || !sockets_.has_unsent();
  const bool closes = says_goodbye_.load(std::memory_order_acquire) || (closed_sent_ && has_sent_all);
  return closes || !sockets_.may_be_restored() ? std::vector<StreamBundle::LostStream>() : sockets_.lost_streams();
}

bool RemotePeer::restore(std::size_t number, std::uint32_t generation, int fd) {
  if (!sockets_.end_outdated(number, generation)) return false;
  handle_ended_streams();  // queues again what the old socket may have lost, before the new one takes its place
  if (sockets_.replace(number, generation, fd)) repeat_short_frames();
  flush();
  return true;
}

void RemotePeer::end_stream(std::size_t number, std::uint32_t generation) {
  sockets_.end_lost(number, generation);
  handle_ended_streams();
}

// Everything that a peer sends may be wrong. What is checked here and in payload_buffer() keeps interpreters, which do
// not check it again, inside the memory and the numbers of the region.
bool RemotePeer::is_valid_box(const FrameHeader& frame) const {
  const std::uint64_t seq = frame.words[0];
  const std::uint64_t index = frame.words[2] >> 32;
  const std::uint64_t at = frame.words[4];
  if (seq == 0 || seq > max_pieces_begun()) return false;
  if (index >= layout_.flags() || index % kSlots != (seq - 1) % kSlots) return false;
  return at <= layout_.slot_bytes && frame.bytes <= layout_.slot_bytes - at;
}

std::uint8_t* RemotePeer::payload_buffer(const FrameHeader& frame, std::uint8_t* text) {
  switch (frame.kind) {
    case kBox:
      return is_valid_box(frame) ? view_.slot(frame.words[0] - 1) + frame.words[4] : nullptr;
    case kDone: {
      const std::uint64_t before = view_.pieces_done->load(std::memory_order_relaxed);
      const std::uint64_t done = frame.words[0];
      if (done < before && channel_->keeps_order()) return nullptr;
      return frame.bytes == 0 && done <= max_pieces_begun() ? text : nullptr;
    }
    case kHeader:
      return frame.bytes < kOpText && frame.words[0] != 0 ? text : nullptr;
    case kWaiting:
      return frame.bytes == 0 && is_rank_or_none(frame.words[0], layout_.ranks) ? text : nullptr;
    case kFailure:
      return frame.bytes < sizeof(FailureRecord::text) && is_failure(frame.words[0]) &&
                     is_rank_or_none(frame.words[1], layout_.ranks)
                 ? text
                 : nullptr;
    case kClosed:
    case kHello:
      return frame.bytes == 0 ? text : nullptr;
    default:
      return nullptr;
  }
}

void RemotePeer::on_frame(const FrameHeader& frame, const std::uint8_t* payload) {
  RegionHeader& region = *view_.header;
  heard_ = true;
  switch (frame.kind) {
    case kBox:
      on_box(frame);
      break;
    case kDone:
      // It may come twice, or behind a later one, unless the channel keeps the order.
      if (frame.words[0] > region.pieces_done.load(std::memory_order_relaxed)) {
        region.pieces_done.store(frame.words[0], std::memory_order_release);
      }
      break;
    case kHeader: {
      OpHeader& header = region.ops[frame.words[0] % kOpRing];
      // A repeated header may overtake older ones.
      if (header.number.load(std::memory_order_relaxed) > frame.words[0]) break;
      header.number.store(0, std::memory_order_release);  // while it changes, other threads find no operation here
      header.fingerprint.store(frame.words[1], std::memory_order_relaxed);
      std::memcpy(header.text, payload, frame.bytes);
      header.text[frame.bytes] = 0;
      header.number.store(frame.words[0], std::memory_order_release);
      break;
    }
    case kWaiting:
      region.waiting_for.store(static_cast<std::int32_t>(frame.words[0]), std::memory_order_relaxed);
      region.waiting_since.store(now_ns(), std::memory_order_release);  // by the clock of this host
      break;
    case kFailure:
      failure_ = frame;
      failure_text_.assign(reinterpret_cast<const char*>(payload), frame.bytes);
      fails_after_ = frame.words[2];
      fails_at_ns_ = now_ns() + kFailureWaitNs;
      read_last_words();
      break;
    case kClosed:
      closes_after_ = frame.words[0];
      says_goodbye_.store(true, std::memory_order_release);
      read_last_words();
      break;
    case kHello:
      greeted_ = true;
      break;
    default:
      break;
  }
}

// The flag's `seq` is stored last: an interpreter that reads it may read the rest and the payload.
void RemotePeer::on_box(const FrameHeader& frame) {
  const std::size_t index = frame.words[2] >> 32;
  if (view_.stamps) {
    DeliveryStamp& stamp = view_.stamps[index * layout_.ranks + own_.rank];
    stamp.first.store(frame.words[3], std::memory_order_relaxed);
    stamp.seq.store(frame.words[0], std::memory_order_release);
  }
  arrived_[index] = {frame.words[4], frame.bytes};
  BoxFlag& flag = view_.flags[index];
  flag.operation.store(frame.words[1], std::memory_order_relaxed);
  flag.checksum.store(static_cast<std::uint32_t>(frame.words[2]), std::memory_order_relaxed);
  flag.seq.store(frame.words[0], std::memory_order_release);
  ++boxes_received_;
}

void RemotePeer::read_last_words() {
  RegionHeader& region = *view_.header;
  if (closes_after_ <= boxes_received_) region.closed.store(1, std::memory_order_release);
  if (fails_after_ == kNever) return;
  // Once the connection has ended no payload can arrive; without this the end would be reported instead of the failure.
  if (fails_after_ > boxes_received_ && now_ns() < fails_at_ns_ && !has_ended()) return;
  fails_after_ = kNever;
  FailureRecord& failure = region.failure;
  std::uint32_t none = 0;
  if (!failure.state.compare_exchange_strong(none, 1)) return;
  failure.kind = static_cast<ErrorKind>(failure_.words[0]);
  failure.failed_rank = static_cast<std::int32_t>(failure_.words[1]);
  failure_text_.copy(failure.text, failure_text_.size());
  failure.text[failure_text_.size()] = 0;
  failure.state.store(2, std::memory_order_release);
}

}  // namespace dtcomm
