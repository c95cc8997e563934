// A socket that carries frames to and from one peer. Nothing here blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "net/frame_channel.h"

namespace dtcomm {

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
  // How many of the queued frames have data that stays with the caller.
  std::size_t queued_payloads() const;
  // Whether frames that are queued now may be sent.
  bool can_send() const { return !ended() && send_error_.empty(); }
  // Whether the connection has ended, by either side or by an error, and how.
  bool ended() const { return connection_end_.reached(); }
  const std::string& end_reason() const { return connection_end_.reason(); }
  // Reads what has arrived.
  void receive(FrameSink& sink);
  // Ends the sending direction. The kernel still sends what it has accepted; `unacknowledged` counts those bytes.
  void shutdown_send();
  std::size_t unacknowledged() const;
  // Bytes that the peer's kernel has acknowledged since the connection was made; 0 if this kernel does not count them.
  std::uint64_t acknowledged() const;
  // Ends the connection.
  void end(std::string reason);

 private:
  struct QueuedFrame {
    FrameHeader header;
    std::string text;
    const std::uint8_t* data = nullptr;
    std::size_t size() const { return sizeof header + header.bytes; }
  };
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
  ConnectionEnd connection_end_;
  std::string send_error_;  // why nothing more is sent; empty while frames may be queued
  std::deque<QueuedFrame> queue_;
  std::size_t front_sent_ = 0;                   // bytes of the first queued frame that were sent
  std::array<std::uint8_t, kReadAhead> buffer_;  // bytes that were read and not yet parsed: [begin_, end_)
  std::size_t begin_ = 0, end_ = 0;
  bool in_payload_ = false;  // the rest describes the frame whose payload is being received
  FrameHeader header_;
  std::uint8_t* payload_ = nullptr;
  std::size_t missing_ = 0;
  std::uint8_t text_[FrameSink::kMaxText];
};

}  // namespace dtcomm
