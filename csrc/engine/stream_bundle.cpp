#include "engine/stream_bundle.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "engine/process_page.h"

namespace dtcomm {
namespace {

constexpr std::uint64_t kRateIntervalNs = 50 * 1000 * 1000;
constexpr std::size_t kLeastRates = 8;

// The payload to which a part belongs.
FrameHeader payload_of(FrameHeader part) {
  part.kind = kBox;
  part.bytes = static_cast<std::uint32_t>(PartWords::of(part).payload_bytes);
  return part;
}

}  // namespace

StreamBundle::StreamBundle(const std::vector<int>& fds, std::size_t flags, FrameSink& sink)
    : sink_(sink), handled_end_(fds.size()), generations_(fds.size()), left_(fds.size()), arriving_(fds.size()) {
  for (const int fd : fds) streams_.push_back(std::make_unique<FrameStream>(fd));
  if (fds.size() > 1) {
    part_sender_.emplace(streams_);
    part_receiver_.emplace(streams_, flags);
  }
}

void StreamBundle::enqueue(const FrameHeader& frame, const std::uint8_t* data) {
  if (!part_sender_ || frame.kind != kBox) return control().enqueue(frame, data);
  FrameHeader parts = frame;
  parts.kind = kPart;
  part_sender_->add(parts, data);
}

bool StreamBundle::flush() {
  bool queued = false;
  for (const auto& stream : streams_) stream->flush();
  if (part_sender_) {
    part_sender_->flush();
    queued = part_sender_->has_waiting();
    sample_rate(queued);
  }
  for (const auto& stream : streams_) queued |= !stream->ended() && stream->has_queued();
  return queued;
}

// While parts wait, all streams have something to send, and what is acknowledged is what the link carries. The first
// interval of such a time is left out: the link was not full when it began.
void StreamBundle::sample_rate(bool parts_wait) {
  if (!parts_wait) {
    rate_since_ns_ = 0;
    return;
  }
  const std::uint64_t now = now_ns();
  if (rate_since_ns_ != 0 && now - rate_since_ns_ < kRateIntervalNs) return;
  std::uint64_t acknowledged = 0;
  for (std::size_t number = 1; number < streams_.size(); ++number) acknowledged += streams_[number]->acknowledged();
  if (rate_since_ns_ == 0) {
    rate_intervals_ = 0;
  } else if (++rate_intervals_ > 1 && acknowledged > acknowledged_) {  // else a stream was made anew
    const double seconds = static_cast<double>(now - rate_since_ns_) * 1e-9;
    rates_[rates_seen_++ % kRates] = static_cast<double>(acknowledged - acknowledged_) / seconds;
  }
  rate_since_ns_ = now;
  acknowledged_ = acknowledged;
}

double StreamBundle::measured_rate() const {
  const std::size_t count = std::min(rates_seen_, kRates);
  if (count < kLeastRates) return 0;
  std::array<double, kRates> sorted = rates_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(count / 2);
  std::nth_element(sorted.begin(), middle, sorted.begin() + static_cast<std::ptrdiff_t>(count));
  return *middle;
}

void StreamBundle::receive(std::size_t stream) {
  receiving_ = stream;
  streams_[stream]->receive(part_sender_ ? *this : sink_);
  // Before ends are handled, so that parts which the peer has just reported as done are not sent again.
  if (part_sender_) part_sender_->set_done(pieces_done_);
}

std::uint8_t* StreamBundle::payload_buffer(const FrameHeader& frame, std::uint8_t* text) {
  if (frame.kind == kBox) return nullptr;  // a payload that is not cut into parts
  if (frame.kind != kPart) return sink_.payload_buffer(frame, text);
  const PartWords part = PartWords::of(frame);
  const PartLayout layout(part.payload_bytes);
  ArrivingPart& arriving = arriving_[receiving_];
  arriving.payload = sink_.payload_buffer(payload_of(frame), text);
  if (!arriving.payload || part.number >= layout.count || frame.bytes != layout.bytes(part.number)) return nullptr;
  switch (part_receiver_->begin(receiving_, part)) {
    case PartReceiver::Action::store:
      return arriving.payload + layout.offset(part.number);
    case PartReceiver::Action::drop:
      arriving.payload = nullptr;
      arriving.dropped.resize(std::max<std::uint32_t>(1, frame.bytes));  // not empty, as null would reject the part
      return arriving.dropped.data();
    default:
      return nullptr;
  }
}

void StreamBundle::on_frame(const FrameHeader& frame, const std::uint8_t* payload) {
  if (frame.kind != kPart) {
    if (frame.kind == kDone) pieces_done_ = std::max(pieces_done_, frame.words[0]);
    sink_.on_frame(frame, payload);
  } else if (const std::uint8_t* const whole = arriving_[receiving_].payload) {
    if (part_receiver_->complete(receiving_)) sink_.on_frame(payload_of(frame), whole);
  }
}

void StreamBundle::shutdown_send() {
  for (const auto& stream : streams_) stream->shutdown_send();
}

bool StreamBundle::has_unacknowledged() const {
  return std::any_of(streams_.begin(), streams_.end(), [](const auto& stream) { return stream->unacknowledged() > 0; });
}

// Looks at all streams: a part that begins to arrive on one ends the other one on which it was arriving (PartReceiver).
StreamBundle::Ends StreamBundle::handle_ends() {
  Ends ends;
  for (std::size_t number = 0; number < streams_.size(); ++number) {
    if (!streams_[number]->ended() || handled_end_[number]) continue;
    handled_end_[number] = ends.any = true;
    if (part_sender_) part_sender_->resend(number);
    if (part_sender_ && number == control_) {
      // If none is left, it stays at the last one, which drops what it is given.
      for (control_ = 0; control_ + 1 < streams_.size() && handled_end_[control_];) ++control_;
      ends.control_moved = true;
    }
    // After the parts have been queued again: a thread that sees 0 here may report the peer as lost.
    left_.fetch_sub(1, std::memory_order_release);
  }
  return ends;
}

void StreamBundle::end(std::size_t number, std::string reason) {
  if (!streams_[number]->ended()) streams_[number]->end(std::move(reason));
}

void StreamBundle::end_lost(std::size_t number, std::uint32_t generation) {
  if (number >= streams_.size() || generations_[number] != generation) return;
  if (restoring_allowed_.load(std::memory_order_acquire)) end(number, "the peer has lost it");
}

void StreamBundle::give_up(std::string reason) {
  if (given_up()) return;  // another thread may be reading the reason
  give_up_reason_ = std::move(reason);
  given_up_.store(true, std::memory_order_release);
}

std::vector<StreamBundle::LostStream> StreamBundle::lost_streams() const {
  std::vector<LostStream> lost;
  for (std::size_t number = 0; number < streams_.size(); ++number) {
    if (handled_end_[number]) lost.push_back({number, generations_[number], streams_[number]->end_reason()});
  }
  return lost;
}

bool StreamBundle::end_outdated(std::size_t number, std::uint32_t generation) {
  if (number >= streams_.size() || generation <= generations_[number] || !may_be_restored()) return false;
  end(number, "made anew by the peer");
  return true;
}

bool StreamBundle::replace(std::size_t number, std::uint32_t generation, int fd) {
  streams_[number] = std::make_unique<FrameStream>(fd);
  part_receiver_->forget(number);
  handled_end_[number] = false;
  generations_[number] = generation;
  ++restored_;
  const bool was_cut_off = left_.fetch_add(1, std::memory_order_release) == 0;
  // Short frames go back to the lowest stream: if the present one ends later, nothing that it held is lost.
  if (number >= control_ && !was_cut_off) return false;
  control_ = number;
  return true;
}

}  // namespace dtcomm
