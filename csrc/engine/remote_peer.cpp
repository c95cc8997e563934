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

// The numbers travel between ranks.
enum Kind : std::uint32_t {
  kBox = 1,
  kDone = 2,
  kHeader = 3,
  kWaiting = 4,
  kFailure = 5,
  kClosed = 6,
  kHello = 7,
  kPart = 8,
};

// Finished pieces between two messages about them: a peer that waits for a slot waits for one that was used long ago.
constexpr std::uint64_t kDoneInterval = 2;
static_assert(2 * kDoneInterval <= kSlots, "slots become free only when the peer learns of it");
constexpr std::uint64_t kHeadersSent = 8;  // a peer is at most this many operations behind
// How long the failure of a peer waits for payloads that it sent before. They may never arrive.
constexpr std::uint64_t kFailureWaitNs = 1000 * 1000 * 1000;
static_assert(sizeof(FailureRecord::text) >= kOpText, "one buffer serves both");

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
    : layout_(layout),
      own_(own),
      memory_(nullptr),
      arrived_(layout.flags()),
      bundle_(fds, layout.flags()),
      from_ucx_(*this, fds.size()) {
  // The word of a frame that describes a part holds a delivery stamp otherwise.
  if (bundle_.uses_parts() && layout.emulates_link) {
    throw std::invalid_argument("several connections over an emulated link");
  }
  for (std::size_t stream = 0; stream < fds.size(); ++stream) {
    from_sockets_.push_back(std::make_unique<Inbound>(*this, stream));
  }
  memory_ = reserve(layout_.bytes());
  view_ = construct_region(memory_, layout_);
  view_.arrived = arrived_.data();
}

RemotePeer::~RemotePeer() { munmap(memory_, layout_.bytes()); }

void RemotePeer::connect(UcxWorker& worker, const std::string& address) {
  ucx_ = &worker.connect(layout_.rank, own_.rank, address, from_ucx_);
  ucx_->enqueue(FrameHeader{kHello}, nullptr);
  ucx_->flush();
}

// May be called without the mutex. A stream may be made anew meanwhile: then the answer was right a moment ago, and
// FailureMonitor asks twice before it reports a peer as lost.
bool RemotePeer::has_ended() const {
  if (view_.header->closed.load(std::memory_order_acquire)) return false;
  if (ucx_ && ucx_->ended()) return true;
  if (!bundle_.ended()) return false;
  const bool says_goodbye = says_goodbye_.load(std::memory_order_acquire);
  // A peer that has said goodbye makes no connection anew: what has not arrived by now does not.
  if (!says_goodbye && bundle_.may_be_restored()) return false;
  // It may end its socket while UCX still delivers what it sent.
  return !(ucx_ && says_goodbye);
}

bool RemotePeer::is_cut_off() const {
  return bundle_.ended() && bundle_.may_be_restored() && !says_goodbye_.load(std::memory_order_acquire) &&
         !view_.header->closed.load(std::memory_order_acquire);
}

const std::string& RemotePeer::end_reason() const {
  const bool socket_tells = bundle_.given_up() || bundle_.streams()[0]->ended();
  return socket_tells || !ucx_ ? bundle_.end_reason() : ucx_->end_reason();
}

void RemotePeer::send_box(std::size_t index, const BoxFlag& flag, std::uint64_t first_ns, const std::uint8_t* data,
                          std::size_t slot_offset, std::size_t bytes) {
  FrameHeader frame{kBox, static_cast<std::uint32_t>(bytes)};
  frame.words = {flag.seq.load(std::memory_order_relaxed), flag.operation.load(std::memory_order_relaxed),
                 static_cast<std::uint64_t>(index) << 32 | flag.checksum.load(std::memory_order_relaxed), first_ns,
                 slot_offset};
  if (bundle_.uses_parts() && !ucx_) {
    frame.kind = kPart;
    bundle_.enqueue_parts(frame, data);
  } else {
    channel().enqueue(frame, data);
  }
  ++boxes_sent_;
}

// A peer that sends parts learns of every piece: it keeps a part, to send it again, until the piece is done.
void RemotePeer::send_pieces_done(std::uint64_t pieces) {
  if (pieces < pieces_done_sent_ + (bundle_.uses_parts() ? 1 : kDoneInterval)) return;
  pieces_done_sent_ = pieces;
  FrameHeader frame{kDone};
  frame.words[0] = pieces;
  channel().enqueue(frame, nullptr);
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
    channel().enqueue(frame, std::string(header.text, strnlen(header.text, kOpText - 1)));
  }
  headers_sent_ = std::max(headers_sent_, number);
}

// This and the two below go over a socket also where payloads go through UCX: the kernel delivers what it has taken
// even if this rank no longer drives UCX.
void RemotePeer::send_waiting_for(int rank) {
  FrameHeader frame{kWaiting};
  frame.words[0] = static_cast<std::uint64_t>(rank);
  bundle_.control().enqueue(frame, nullptr);
}

void RemotePeer::send_failure() {
  const FailureRecord& failure = own_.failure;
  FrameHeader frame{kFailure};
  frame.words[0] = static_cast<std::uint64_t>(failure.kind);
  frame.words[1] = static_cast<std::uint64_t>(failure.failed_rank);
  frame.words[2] = boxes_sent_;  // it may overtake payloads, which go another way; see read_last_words()
  failure_sent_ = true;
  bundle_.control().enqueue(frame, std::string(failure.text, strnlen(failure.text, sizeof failure.text - 1)));
}

void RemotePeer::send_closed() {
  FrameHeader frame{kClosed};
  frame.words[0] = boxes_sent_;
  closed_sent_ = true;
  bundle_.control().enqueue(frame, nullptr);
}

bool RemotePeer::flush() {
  const bool queued = bundle_.flush();
  if (ucx_) ucx_->flush();
  return queued || (ucx_ && !ucx_->ended() && ucx_->has_queued());
}

bool RemotePeer::receive(std::size_t stream) {
  bundle_.streams()[stream]->receive(*from_sockets_[stream]);
  // Before ends are handled, so that parts which the peer has just reported as done are not sent again.
  if (bundle_.uses_parts()) {
    bundle_.set_done(view_.header->pieces_done.load(std::memory_order_relaxed));
    read_last_words();
  }
  return handle_ended_streams();
}

bool RemotePeer::handle_ended_streams() {
  const StreamBundle::Ends ends = bundle_.handle_ends();
  if (ends.control_moved) repeat_short_frames();
  return ends.any;
}

// Sends over the present stream of short frames what the one before it may have lost.
void RemotePeer::repeat_short_frames() {
  FrameHeader frame{kDone};
  frame.words[0] = pieces_done_sent_;
  bundle_.control().enqueue(frame, nullptr);
  const std::uint64_t last = headers_sent_;
  // The last ones only: send_headers() leaves out the others as well.
  headers_sent_ -= std::min(last, kHeadersSent);
  send_headers(last);
  if (failure_sent_) send_failure();
  if (closed_sent_) send_closed();
}

std::vector<RemotePeer::LostStream> RemotePeer::lost_streams() const {
  // A rank that closes still needs a stream for what it has not sent.
  const bool has_sent_all = !bundle_.ended() || !bundle_.has_unsent();
  const bool closes = says_goodbye_.load(std::memory_order_acquire) || (closed_sent_ && has_sent_all);
  return closes || !bundle_.may_be_restored() ? std::vector<LostStream>() : bundle_.lost_streams();
}

bool RemotePeer::restore(std::size_t number, std::uint32_t generation, int fd) {
  if (!bundle_.end_outdated(number, generation)) return false;
  handle_ended_streams();  // queues again what the old socket may have lost, before the new one takes its place
  if (bundle_.replace(number, generation, fd)) repeat_short_frames();
  flush();
  return true;
}

void RemotePeer::end_stream(std::size_t number, std::uint32_t generation) {
  bundle_.end_lost(number, generation);
  handle_ended_streams();
}

bool RemotePeer::is_sending(const std::uint8_t* begin, const std::uint8_t* end) const {
  if (bundle_.is_sending(begin, end)) return true;
  return ucx_ && !ucx_->ended() && ucx_->is_sending(begin, end);
}

// Everything that a peer sends may be wrong. What is checked here and in payload_buffer() keeps interpreters, which do
// not check it again, inside the memory and the numbers of the region.
bool RemotePeer::is_valid_box(const FrameHeader& frame, std::size_t bytes) const {
  const std::uint64_t seq = frame.words[0];
  const std::uint64_t index = frame.words[2] >> 32;
  const std::uint64_t at = frame.words[4];
  if (seq == 0 || seq > max_pieces_begun()) return false;
  if (index >= layout_.flags() || index % kSlots != (seq - 1) % kSlots) return false;
  return at <= layout_.slot_bytes && bytes <= layout_.slot_bytes - at;
}

std::uint8_t* RemotePeer::Inbound::payload_buffer(const FrameHeader& frame) {
  // With several sockets payloads arrive as kPart frames, otherwise as one kBox.
  const bool in_parts = peer_.bundle_.uses_parts() && stream_ < peer_.bundle_.streams().size();
  if (frame.kind == kPart) return in_parts ? part_buffer(frame) : nullptr;
  if (frame.kind == kBox && in_parts) return nullptr;
  return peer_.payload_buffer(frame, text_);
}

std::uint8_t* RemotePeer::Inbound::part_buffer(const FrameHeader& frame) {
  const PartWords part = PartWords::of(frame);
  if (!peer_.is_valid_box(frame, part.payload_bytes)) return nullptr;
  const PeerView& view = peer_.view_;
  return peer_.bundle_.part_buffer(stream_, part, frame.bytes, view.slot(part.seq - 1) + part.slot_offset,
                                   view.flags[part.index].seq.load(std::memory_order_relaxed));
}

void RemotePeer::Inbound::on_frame(const FrameHeader& frame) {
  if (frame.kind != kPart) return peer_.on_frame(frame, text_);
  if (peer_.bundle_.complete_part(stream_)) peer_.on_payload(frame, PartWords::of(frame).payload_bytes);
}

std::uint8_t* RemotePeer::payload_buffer(const FrameHeader& frame, char* text_buffer) {
  auto* const text = reinterpret_cast<std::uint8_t*>(text_buffer);
  switch (frame.kind) {
    case kBox:
      return is_valid_box(frame, frame.bytes) ? view_.slot(frame.words[0] - 1) + frame.words[4] : nullptr;
    case kDone: {
      const std::uint64_t before = view_.pieces_done->load(std::memory_order_relaxed);
      const std::uint64_t done = frame.words[0];
      if (done < before && !ucx_ && !bundle_.uses_parts()) return nullptr;  // a single socket keeps the order
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

void RemotePeer::on_frame(const FrameHeader& frame, const char* text) {
  RegionHeader& region = *view_.header;
  switch (frame.kind) {
    case kBox:
      on_payload(frame, frame.bytes);
      break;
    case kDone:
      // With UCX or several streams it may come twice, or behind a later one.
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
      std::memcpy(header.text, text, frame.bytes);
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
      failure_text_.assign(text, frame.bytes);
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
void RemotePeer::on_payload(const FrameHeader& frame, std::size_t bytes) {
  const std::size_t index = frame.words[2] >> 32;
  if (view_.stamps) {
    DeliveryStamp& stamp = view_.stamps[index * layout_.ranks + own_.rank];
    stamp.first.store(frame.words[3], std::memory_order_relaxed);
    stamp.seq.store(frame.words[0], std::memory_order_release);
  }
  arrived_[index] = {frame.words[4], bytes};
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
