// The sockets to one peer. There is one, which carries all frames, or there are several for a peer that is far away
// (docs/how-it-works/engine.md, "Several connections to one peer"): payloads then go in parts over all but the first of
// them, and short frames go over the first one, where they do not queue behind payloads.
//
// A stream is one of the sockets, by its number. Its generation counts how often it was made anew. If a stream ends,
// the others carry its parts, and one of them carries short frames if it carried them; RemotePeer then repeats these,
// as it knows which of them still matter. Streams are made anew only if allow_restoring() was called.
//
// RemotePeerSet's mutex guards an object of this class. Threads that only list the peers do not take it: they may call
// ended(), may_be_restored() and, once the peer is lost, end_reason().
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/payload_parts.h"
#include "net/frame_stream.h"

namespace dtcomm {

// The kinds of frames. The numbers travel between ranks.
enum FrameKind : std::uint32_t {
  kBox = 1,
  kDone = 2,
  kHeader = 3,
  kWaiting = 4,
  kFailure = 5,
  kClosed = 6,
  kHello = 7,
  kPart = 8,
};

class StreamBundle final : public FrameChannel, private FrameSink {
 public:
  // Takes ownership of the connected sockets, at least one. Frames go to `sink`, which must outlive this object, and
  // never in parts. Payloads have flags below `flags`.
  StreamBundle(const std::vector<int>& fds, std::size_t flags, FrameSink& sink);

  const Streams& streams() const { return streams_; }
  // Whether payloads travel in parts: there are several streams.
  bool uses_parts() const { return part_sender_.has_value(); }

  void enqueue(const FrameHeader& frame, const std::uint8_t* data) override;
  void enqueue(FrameHeader frame, std::string text) override { control().enqueue(frame, std::move(text)); }
  bool flush() override;
  // A single stream has passed a payload to the kernel before the peer can be done with it; a part may be repeated.
  bool is_sending(const std::uint8_t* begin, const std::uint8_t* end) const override {
    return part_sender_ && part_sender_->is_sending(begin, end);
  }
  bool keeps_order() const override { return !uses_parts(); }
  // Whether no stream is left. One may still be made anew: see may_be_restored().
  bool ended() const override { return left_.load(std::memory_order_acquire) == 0; }
  const std::string& end_reason() const override { return given_up() ? give_up_reason_ : streams_[0]->end_reason(); }

  // Reads all frames that have arrived on a stream. handle_ends() is to be called then.
  void receive(std::size_t stream);
  // Ends the sending direction. The kernel still sends what it has accepted.
  void shutdown_send();
  // Whether the peer's kernel has still to acknowledge bytes that this one has taken.
  bool has_unacknowledged() const;
  // Whether parts wait for a stream.
  bool has_unsent() const { return part_sender_ && part_sender_->has_unsent(); }
  // Bytes per second that the peer has acknowledged on all payload streams together while more was waiting: the median
  // of the last intervals. 0 if there is one stream, or too few intervals have passed.
  double measured_rate() const;

  struct Ends {
    bool any = false;  // streams have ended
    // Another stream carries short frames now; those that the stream before may have lost are missing.
    bool control_moved = false;
  };
  // Lets the other streams carry what those that have ended since the last call may have lost.
  Ends handle_ends();
  // The peer has lost this stream, which may still look alive at this end. handle_ends() is to be called then.
  void end_lost(std::size_t number, std::uint32_t generation);

  // Streams that end will be made anew, by replace(). Does nothing if there is only one, over which frames are not
  // repeated.
  void allow_restoring() { restoring_allowed_.store(streams_.size() > 1, std::memory_order_release); }
  // No stream can be made anew any more.
  void give_up(std::string reason);
  bool may_be_restored() const { return restoring_allowed_.load(std::memory_order_acquire) && !given_up(); }
  // A stream that has ended, and has been made anew `generation` times.
  struct LostStream {
    std::size_t number;
    std::uint32_t generation;
    std::string reason;
  };
  std::vector<LostStream> lost_streams() const;
  // Making a stream anew: end_outdated(), then handle_ends(), then replace(). end_outdated() ends the stream if the
  // peer alone has lost it; false if its generation is not below `generation` or no stream may be made anew.
  bool end_outdated(std::size_t number, std::uint32_t generation);
  // Puts a connected socket in the place of the stream and takes ownership of it. True if it carries short frames from
  // now on, so that they are to be repeated.
  bool replace(std::size_t number, std::uint32_t generation, int fd);
  std::uint64_t restored() const { return restored_; }

 private:
  // The part that is arriving on a stream: where its payload begins, or, if it is there already, bytes that nothing
  // reads.
  struct ArrivingPart {
    std::uint8_t* payload = nullptr;
    std::vector<std::uint8_t> dropped;
  };
  // The frames of several streams. They become those of sink_.
  std::uint8_t* payload_buffer(const FrameHeader& frame, std::uint8_t* text) override;
  void on_frame(const FrameHeader& frame, const std::uint8_t* payload) override;
  // The stream of short frames.
  FrameStream& control() { return *streams_[control_]; }
  bool given_up() const { return given_up_.load(std::memory_order_acquire); }
  void sample_rate(bool parts_wait);
  void end(std::size_t number, std::string reason);

  FrameSink& sink_;
  Streams streams_;
  std::size_t control_ = 0;                 // the stream of short frames
  std::vector<bool> handled_end_;           // by stream
  std::vector<std::uint32_t> generations_;  // by stream: how often it was made anew
  std::atomic<std::size_t> left_;           // streams whose end was not handled
  std::atomic<bool> restoring_allowed_{false}, given_up_{false};
  std::string give_up_reason_;             // set before given_up_
  std::uint64_t restored_ = 0;             // streams
  std::optional<PartSender> part_sender_;  // both if there are several streams
  std::optional<PartReceiver> part_receiver_;
  std::vector<ArrivingPart> arriving_;  // by stream
  std::size_t receiving_ = 0;           // the stream whose frames are being read
  std::uint64_t pieces_done_ = 0;       // by the peer
  static constexpr std::size_t kRates = 32;
  std::array<double, kRates> rates_{};  // the last ones, in a ring
  std::size_t rates_seen_ = 0;
  std::uint64_t rate_since_ns_ = 0;  // the beginning of the present interval; 0: no parts wait
  std::uint64_t acknowledged_ = 0;   // bytes until then
  std::size_t rate_intervals_ = 0;   // since parts wait
};

}  // namespace dtcomm
