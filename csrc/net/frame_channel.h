// What carries frames to and from a peer: a fixed header and a payload. StreamBundle does it over sockets, the channels
// of UcxWorker over UCX. Nothing here blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

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
  // Where to store the payload of the frame; null rejects the frame, which ends the connection. `text` is memory of the
  // channel, kMaxText bytes, for a payload that is read only in on_frame().
  static constexpr std::size_t kMaxText = 384;
  virtual std::uint8_t* payload_buffer(const FrameHeader& frame, std::uint8_t* text) = 0;
  // The payload has been stored at `payload`, which payload_buffer() returned.
  virtual void on_frame(const FrameHeader& frame, const std::uint8_t* payload) = 0;
};

class FrameChannel {
 public:
  virtual ~FrameChannel() = default;
  // Queues a frame. `data` must stay unchanged until it has been sent; a `text` is copied.
  virtual void enqueue(const FrameHeader& frame, const std::uint8_t* data) = 0;
  virtual void enqueue(FrameHeader frame, std::string text) = 0;
  // Sends queued frames, as far as that is possible now; true if something is left that can still be sent.
  virtual bool flush() = 0;
  // Whether some of these bytes may still be read, although the peer has finished their piece.
  virtual bool is_sending(const std::uint8_t* begin, const std::uint8_t* end) const = 0;
  // Whether frames arrive once and in the order in which they were sent.
  virtual bool keeps_order() const = 0;
  // Whether the connection has ended, by either side or by an error, and how. May be called by any thread.
  virtual bool ended() const = 0;
  virtual const std::string& end_reason() const = 0;
  // What the channel has chosen to carry its frames, such as "tcp/eth0"; empty if it has no choice.
  virtual std::vector<std::string> lanes() const { return {}; }
};

// How a connection has ended, if it has. Threads that list the peers read it while another one sets it.
class ConnectionEnd {
 public:
  void set(std::string reason) {
    reason_ = std::move(reason);
    reached_.store(true, std::memory_order_release);
  }
  bool reached() const { return reached_.load(std::memory_order_acquire); }
  const std::string& reason() const { return reason_; }

 private:
  std::atomic<bool> reached_{false};
  std::string reason_;
};

}  // namespace dtcomm
