// One TCP connection to a peer that carries frames: a fixed header and a payload. Nothing here blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

namespace dtcomm {

// Precedes every payload. Both ends use the same byte order.
struct FrameHeader {
  std::uint32_t kind = 0;
  std::uint32_t bytes = 0;  // of the payload
  std::array<std::uint64_t, 5> words{};
};

// Receives the frames of a stream.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // Where to store the payload of the frame; null rejects the frame, which ends the connection.
  virtual std::uint8_t* payload_buffer(const FrameHeader& frame) = 0;
  // The payload has been stored.
  virtual void on_frame(const FrameHeader& frame) = 0;
};

class FrameStream {
 public:
  // Takes ownership of the connected socket. Forked children close it, so that the peer sees this process end.
  explicit FrameStream(int fd);
  ~FrameStream();
  FrameStream(const FrameStream&) = delete;

  int fd() const { return fd_; }
  // Queues a frame. `data` must stay unchanged until it has been sent; a `text` is copied.
  void enqueue(const FrameHeader& frame, const std::uint8_t* data);
  void enqueue(FrameHeader frame, std::string text);
  // Passes queued frames to the kernel, as many as it accepts.
  void flush();
  bool has_queued() const { return !queue_.empty(); }
  // Reads what has arrived; true if anything had.
  bool receive(FrameSink& sink);
  // Whether the connection has ended, by either side or by an error, and how.
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  const std::string& end_reason() const { return end_reason_; }
  // Ends the sending direction. The kernel still sends what it has accepted; `unacknowledged` counts those bytes.
  void shutdown_send();
  std::size_t unacknowledged() const;

 private:
  struct QueuedFrame {
    FrameHeader header;
    std::string text;
    const std::uint8_t* data = nullptr;
    std::size_t size() const { return sizeof header + header.bytes; }
  };
  void end(std::string reason);
  void end_sending(std::string reason);
  // What one read found: whether any bytes, and whether no more are available now.
  struct ReadResult {
    bool any;
    bool drained;
  };
  ReadResult read_more();
  bool parse(FrameSink& sink);

  static constexpr std::size_t kReadAhead = 16 * 1024;
  int fd_;
  std::atomic<bool> ended_{false};  // also read by threads that list the peers
  std::string end_reason_;
  std::string send_error_;  // why nothing more is sent; empty while frames may be queued
  std::deque<QueuedFrame> queue_;
  std::size_t front_sent_ = 0;                   // bytes of the first queued frame that were sent
  std::array<std::uint8_t, kReadAhead> buffer_;  // bytes that were read and not yet parsed: [begin_, end_)
  std::size_t begin_ = 0, end_ = 0;
  bool in_payload_ = false;  // the rest describes the frame whose payload is being received
  FrameHeader header_;
  std::uint8_t* payload_ = nullptr;
  std::size_t missing_ = 0;
};

}  // namespace dtcomm
