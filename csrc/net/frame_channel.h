// What carries frames to a peer: a fixed header and a payload. FrameStream does it over a socket, UcxChannel over UCX.
// Nothing here blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace dtcomm {

// Precedes every payload. Both ends use the same byte order.
struct FrameHeader {
  std::uint32_t kind = 0;
  std::uint32_t bytes = 0;  // of the payload
  std::array<std::uint64_t, 5> words{};
};

// Receives the frames of a channel.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // Where to store the payload of the frame; null rejects the frame, which ends the connection.
  virtual std::uint8_t* payload_buffer(const FrameHeader& frame) = 0;
  // The payload has been stored.
  virtual void on_frame(const FrameHeader& frame) = 0;
};

class FrameChannel {
 public:
  virtual ~FrameChannel() = default;
  // Queues a frame. `data` must stay unchanged until it has been sent; a `text` is copied.
  virtual void enqueue(const FrameHeader& frame, const std::uint8_t* data) = 0;
  virtual void enqueue(FrameHeader frame, std::string text) = 0;
  // Sends queued frames, as far as that is possible now.
  virtual void flush() = 0;
  // Whether there are frames that have not been sent to their end.
  virtual bool has_queued() const = 0;
  // Whether the connection has ended, by either side or by an error, and how.
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  const std::string& end_reason() const { return end_reason_; }

 protected:
  void set_ended(std::string reason) {
    end_reason_ = std::move(reason);
    ended_.store(true, std::memory_order_release);
  }

 private:
  std::atomic<bool> ended_{false};  // also read by threads that list the peers
  std::string end_reason_;
};

}  // namespace dtcomm
