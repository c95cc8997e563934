#include "engine/payload_parts.h"

#include "engine/shm_layout.h"

namespace dtcomm {

PartWords PartWords::of(const FrameHeader& frame) {
  const std::uint64_t word = frame.words[3];
  return {frame.words[0],
          frame.words[2] >> 32,
          frame.words[4],
          static_cast<std::size_t>(word >> 32),
          static_cast<std::uint32_t>(word & 0xffff),
          static_cast<std::uint32_t>(word >> 16 & 0xffff)};
}

void PartWords::describe_part(FrameHeader& frame) const {
  frame.words[3] =
      static_cast<std::uint64_t>(payload_bytes) << 32 | std::uint64_t{transmission & 0xffff} << 16 | number;
}

PartLayout::PartLayout(std::size_t bytes_of_payload)
    : payload_bytes(bytes_of_payload),
      part_bytes(std::max(kMinPartBytes, round_up((bytes_of_payload + kMaxParts - 1) / kMaxParts, kPage))),
      count(std::max<std::size_t>(1, (bytes_of_payload + part_bytes - 1) / part_bytes)) {}

void PartSender::add(const FrameHeader& payload, const std::uint8_t* data) {
  const PartLayout layout(payload.bytes);
  for (std::size_t number = 0; number < layout.count; ++number) {
    Part part{payload, data + layout.offset(number)};
    part.header.bytes = static_cast<std::uint32_t>(layout.bytes(number));
    PartWords{0, 0, 0, layout.payload_bytes, static_cast<std::uint32_t>(number), 0}.describe_part(part.header);
    waiting_.push_back(part);
  }
}

// The next stream, by turns, that has passed everything to the kernel; null if there is none.
FrameStream* PartSender::idle_stream(std::size_t& number) {
  const std::size_t others = streams_.size() - 1;
  bool any = false;
  for (std::size_t i = 0; i < others; ++i) {
    number = 1 + (last_ + i) % others;
    FrameStream& stream = *streams_[number];
    any |= stream.can_send();
    if (stream.can_send() && !stream.has_queued()) return &stream;
  }
  number = 0;
  FrameStream& first = *streams_[0];
  return !any && first.can_send() && !first.has_queued() ? &first : nullptr;
}

void PartSender::flush() {
  std::size_t number = 0;
  while (!waiting_.empty()) {
    FrameStream* const stream = idle_stream(number);
    if (!stream) return;
    last_ = number;
    const Part part = waiting_.front();
    waiting_.pop_front();
    sent_[number].push_back(part);
    stream->enqueue(part.header, part.data);
    stream->flush();
  }
}

bool PartSender::has_waiting() const {
  if (waiting_.empty()) return false;
  return std::any_of(streams_.begin(), streams_.end(), [](const auto& stream) { return stream->can_send(); });
}

void PartSender::set_done(std::uint64_t pieces) {
  done_ = std::max(done_, pieces);
  for (std::size_t number = 0; number < sent_.size(); ++number) {
    std::deque<Part>& sent = sent_[number];
    // The last ones may not have been passed to the kernel: is_sending() looks for them here.
    while (sent.size() > streams_[number]->queued_payloads() && sent.front().seq() <= done_) sent.pop_front();
  }
  const auto is_done = [this](const Part& part) { return part.seq() <= done_; };
  while (!waiting_.empty() && is_done(waiting_.front())) waiting_.pop_front();
}

void PartSender::resend(std::size_t stream) {
  std::deque<Part>& sent = sent_[stream];
  for (; !sent.empty(); sent.pop_back()) {
    Part part = sent.back();
    if (part.seq() <= done_) continue;
    PartWords words = PartWords::of(part.header);
    ++words.transmission;
    words.describe_part(part.header);
    waiting_.push_front(part);
  }
}

bool PartSender::is_sending(const std::uint8_t* begin, const std::uint8_t* end) const {
  const auto touches = [=](const Part& part) { return part.touches(begin, end); };
  if (std::any_of(waiting_.begin(), waiting_.end(), touches)) return true;
  for (std::size_t number = 0; number < sent_.size(); ++number) {
    const std::deque<Part>& sent = sent_[number];
    const std::size_t queued = std::min(sent.size(), streams_[number]->queued_payloads());
    if (std::any_of(sent.end() - static_cast<std::ptrdiff_t>(queued), sent.end(), touches)) return true;
  }
  return false;
}

PartReceiver::Action PartReceiver::begin(std::size_t stream, const PartWords& part) {
  in_progress_[stream].active = false;
  Payload& payload = payloads_[part.index];
  const bool is_complete = part.seq == payload.seq && payload.missing == 0;
  if (is_complete || part.seq < payload.seq) return Action::drop;
  for (std::size_t other = 0; other < in_progress_.size(); ++other) {
    InProgress& arriving = in_progress_[other];
    if (other == stream || !arriving.active || streams_[other]->ended() || arriving.part.index != part.index) continue;
    if (arriving.part.seq != part.seq) return Action::reject;
    if (arriving.part.number != part.number) continue;
    // Only one of them may write to the place of the part.
    if (arriving.part.transmission >= part.transmission) return Action::reject;
    arriving.active = false;
    streams_[other]->end("given up by the peer");
  }
  if (payload.seq != part.seq) {
    payload = {part.seq, part.slot_offset, part.payload_bytes, PartLayout(part.payload_bytes).count, 0};
  } else if (payload.bytes != part.payload_bytes || payload.slot_offset != part.slot_offset) {
    return Action::reject;
  }
  if ((payload.arrived >> part.number & 1) != 0) return Action::drop;
  in_progress_[stream] = {true, part};
  return Action::store;
}

bool PartReceiver::complete(std::size_t stream) {
  InProgress& arrived = in_progress_[stream];
  arrived.active = false;
  Payload& payload = payloads_[arrived.part.index];
  payload.arrived |= std::uint64_t{1} << arrived.part.number;
  return --payload.missing == 0;
}

}  // namespace dtcomm
