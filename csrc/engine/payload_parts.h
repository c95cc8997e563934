// Payloads that travel over several connections to one peer: each is cut into parts, and a part goes over whichever
// connection takes it first. Both ends derive the parts from the payload's size. If a connection ends, the parts that
// it may have lost are sent again over the others, and the receiver drops those that it has already. The protocol is
// described in docs/how-it-works/engine.md.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "net/frame_stream.h"

namespace dtcomm {

// The words of a frame that carries a part. They are those of a whole payload but for one, which describes the part.
struct PartWords {
  std::uint64_t seq;           // of the payload's flag
  std::uint64_t index;         // of the flag
  std::uint64_t slot_offset;   // of the payload
  std::size_t payload_bytes;   // of all parts
  std::uint32_t number;        // of the part
  std::uint32_t transmission;  // how often the part was sent before

  static PartWords of(const FrameHeader& frame);
  void describe_part(FrameHeader& frame) const;  // sets the word that describes the part
};

struct PartLayout {
  static constexpr std::size_t kMaxParts = 64;  // a bit of a word each
  static constexpr std::size_t kMinPartBytes = 128 * 1024;

  explicit PartLayout(std::size_t payload_bytes);

  std::size_t payload_bytes, part_bytes, count;
  std::size_t offset(std::size_t number) const { return number * part_bytes; }
  std::size_t bytes(std::size_t number) const { return std::min(part_bytes, payload_bytes - offset(number)); }
};

using Streams = std::vector<std::unique_ptr<FrameStream>>;

// Sends parts over all streams but the first, which is for short frames; over the first one if the others have ended.
class PartSender {
 public:
  explicit PartSender(const Streams& streams) : streams_(streams), sent_(streams.size()) {}

  // Queues a payload. `data` must stay unchanged until the peer is done with its piece and is_sending() returns false.
  void add(const FrameHeader& payload, const std::uint8_t* data);
  // Gives queued parts to the streams, as many as they take now.
  void flush();
  // Whether there are parts that no stream has taken but one can.
  bool has_waiting() const;
  // The peer has finished this number of pieces: their parts need not be sent again.
  void set_done(std::uint64_t pieces);
  // A stream has ended: sends what it may have lost over the others.
  void resend(std::size_t stream);
  // Whether some parts wait for a stream, as those that there were have ended.
  bool has_unsent() const { return !waiting_.empty(); }
  // Whether some of these bytes still have to be passed to the kernel.
  bool is_sending(const std::uint8_t* begin, const std::uint8_t* end) const;

 private:
  struct Part {
    FrameHeader header;
    const std::uint8_t* data;
    std::uint64_t seq() const { return header.words[0]; }
    bool touches(const std::uint8_t* begin, const std::uint8_t* end) const {
      return data < end && data + header.bytes > begin;
    }
  };
  FrameStream* idle_stream(std::size_t& number);

  const Streams& streams_;
  std::deque<Part> waiting_;            // for a stream
  std::vector<std::deque<Part>> sent_;  // by stream: the peer may not have them yet
  std::size_t last_ = 0;                // stream that was given a part
  std::uint64_t done_ = 0;              // pieces
};

// Notes which parts have arrived.
class PartReceiver {
 public:
  PartReceiver(Streams& streams, std::size_t flags)
      : streams_(streams), in_progress_(streams.size()), payloads_(flags) {}

  enum class Action { store, drop, reject };
  // What to do with a part whose header has arrived and whose number the payload has. Ends a stream on which the same
  // part was arriving and that the sender must have given up.
  Action begin(std::size_t stream, const PartWords& part);
  // A part that was to be stored has arrived whole. True if it completes the payload.
  bool complete(std::size_t stream);
  // Another stream takes the place of this one, which has ended.
  void forget(std::size_t stream) { in_progress_[stream].active = false; }

 private:
  struct InProgress {
    bool active = false;
    PartWords part{};
  };
  struct Payload {
    std::uint64_t seq = 0;
    std::uint64_t slot_offset = 0;
    std::size_t bytes = 0;
    std::size_t missing = 0;
    std::uint64_t arrived = 0;  // bits by part
  };
  Streams& streams_;
  std::vector<InProgress> in_progress_;  // by stream
  std::vector<Payload> payloads_;        // by flag
};

}  // namespace dtcomm
