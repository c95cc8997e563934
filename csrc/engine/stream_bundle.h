// The sockets to one peer. There is one, which carries all frames, or there are several for a peer that is far away
// (docs/how-it-works/engine.md, "Several connections to one peer"): payloads then go in parts over all but the first of
// them, and short frames go over the first one, where they do not queue behind payloads.
//
// A stream is one of the sockets, by its number. Its generation counts how often it was made anew. If a stream ends,
// the others carry its parts, and one of them carries short frames if it carried them; RemotePeer then repeats these,
// as it knows which of them still matter. Streams are made anew only if allow_restoring() was called.
//
// RemotePeerSet's mutex guards an object of this class. Threads that only list the peers do not take it: they may call
// ended(), may_be_restored(), given_up() and, once the peer is lost, end_reason().
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

class StreamBundle {
 public:
  // Takes ownership of the connected sockets, at least one. Payloads have flags below `flags`.
  StreamBundle(const std::vector<int>& fds, std::size_t flags);

  const Streams& streams() const { return streams_; }
  // Whether payloads travel in parts: there are several streams.
  bool uses_parts() const { return part_sender_.has_value(); }
  // The stream of short frames.
  FrameStream& control() { return *streams_[control_]; }

  // The rest of this group needs uses_parts(), except flush(), has_unsent() and is_sending().
  // Queues the parts of a payload, which all have the kind of `payload`; see PartSender.
  void enqueue_parts(const FrameHeader& payload, const std::uint8_t* data) { part_sender_->add(payload, data); }
  // Sends what was queued, as far as that is possible now; true if something is left that a stream can carry.
  bool flush();
  // The peer has finished this number of pieces: their parts need not be sent again.
  void set_done(std::uint64_t pieces) { part_sender_->set_done(pieces); }
  // Whether parts wait for a stream.
  bool has_unsent() const { return part_sender_ && part_sender_->has_unsent(); }
  // Whether some of these bytes belong to parts that the kernel has not taken yet.
  bool is_sending(const std::uint8_t* begin, const std::uint8_t* end) const {
    return part_sender_ && part_sender_->is_sending(begin, end);
  }
  // Bytes per second that the peer has acknowledged on all payload streams together while more was waiting: the median
  // of the last intervals. 0 if there is one stream, or too few intervals have passed.
  double measured_rate() const;

  // Where to store a part of `bytes` bytes whose header has arrived on a stream; null rejects it. `payload` is the
  // place of the whole payload, `seq_there` the last payload of this flag that is complete.
  std::uint8_t* part_buffer(std::size_t stream, const PartWords& part, std::size_t bytes, std::uint8_t* payload,
                            std::uint64_t seq_there);
  // The part for which part_buffer() was called last on this stream has arrived. True if it completes its payload.
  bool complete_part(std::size_t stream);

  struct Ends {
    bool any = false;  // streams have ended
    // Another stream carries short frames now; those that the stream before may have lost are missing.
    bool control_moved = false;
  };
  // Lets the other streams carry what those that have ended since the last call may have lost.
  Ends handle_ends();
  // The peer has lost this stream, which may still look alive at this end. handle_ends() is to be called then.
  void end_lost(std::size_t number, std::uint32_t generation);
  // Whether no stream is left.
  bool ended() const { return left_.load(std::memory_order_acquire) == 0; }
  const std::string& end_reason() const { return given_up() ? give_up_reason_ : streams_[0]->end_reason(); }

  // Streams that end will be made anew, by replace(). Does nothing if there is only one, over which frames are not
  // repeated.
  void allow_restoring() { restoring_allowed_.store(streams_.size() > 1, std::memory_order_release); }
  // No stream can be made anew any more.
  void give_up(std::string reason);
  bool given_up() const { return given_up_.load(std::memory_order_acquire); }
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
  // The part that is arriving on a stream and is there already: its bytes go into `bytes`, which nothing reads.
  struct Dropped {
    bool active = false;
    std::vector<std::uint8_t> bytes;
  };
  void sample_rate(bool parts_wait);
  void end(std::size_t number, std::string reason);

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
  std::vector<Dropped> dropped_;  // by stream
  static constexpr std::size_t kRates = 32;
  std::array<double, kRates> rates_{};  // the last ones, in a ring
  std::size_t rates_seen_ = 0;
  std::uint64_t rate_since_ns_ = 0;  // the beginning of the present interval; 0: no parts wait
  std::uint64_t acknowledged_ = 0;   // bytes until then
  std::size_t rate_intervals_ = 0;   // since parts wait
};

}  // namespace dtcomm
