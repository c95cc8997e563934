#include "net/frame_stream.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "net/forked_children.h"

namespace dtcomm {
namespace {

constexpr std::size_t kFramesPerCall = 32;
constexpr const char* kClosedByPeer = "closed by the peer";
constexpr std::size_t kMaxReceive = 4 * 1024 * 1024;  // bytes of one peer before the others are served

bool is_temporary(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

FrameStream::FrameStream(int fd) : fd_(fd) { close_in_children(fd); }

FrameStream::~FrameStream() { close_unless_in_child(fd_); }

void FrameStream::enqueue(const FrameHeader& frame, const std::uint8_t* data) {
  if (can_send()) queue_.push_back({frame, {}, data});
}

void FrameStream::enqueue(FrameHeader frame, std::string text) {
  if (!can_send()) return;
  frame.bytes = static_cast<std::uint32_t>(text.size());
  queue_.push_back({frame, std::move(text), nullptr});
}

std::size_t FrameStream::queued_payloads() const {
  return static_cast<std::size_t>(
      std::count_if(queue_.begin(), queue_.end(), [](const QueuedFrame& frame) { return frame.data != nullptr; }));
}

void FrameStream::flush() {
  while (!queue_.empty()) {
    iovec parts[2 * kFramesPerCall];
    std::size_t count = 0;
    std::size_t skip = front_sent_;
    std::size_t whole = 0;
    for (std::size_t i = 0; i < std::min(queue_.size(), kFramesPerCall); ++i) {
      QueuedFrame& frame = queue_[i];
      const void* const starts[2] = {&frame.header,
                                     frame.data ? static_cast<const void*>(frame.data) : frame.text.data()};
      const std::size_t sizes[2] = {sizeof frame.header, frame.header.bytes};
      for (int part = 0; part < 2; ++part) {
        const std::size_t over = std::min(skip, sizes[part]);
        skip -= over;
        if (sizes[part] == over) continue;
        parts[count++] = {const_cast<char*>(static_cast<const char*>(starts[part])) + over, sizes[part] - over};
        whole += sizes[part] - over;
      }
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (!is_temporary(errno)) end_sending(errno == EPIPE ? kClosedByPeer : std::strerror(errno));
      return;
    }
    front_sent_ += static_cast<std::size_t>(sent);
    while (!queue_.empty() && front_sent_ >= queue_.front().size()) {
      front_sent_ -= queue_.front().size();
      queue_.pop_front();
    }
    if (static_cast<std::size_t>(sent) < whole) return;
  }
}

void FrameStream::end(std::string reason) {
  connection_end_.set(std::move(reason));
  queue_.clear();
  ::shutdown(fd_, SHUT_RDWR);  // so that the peer learns of it
}

// A frame may have been sent in part, so no other one may follow. Frames that the peer sent before are still to be
// read: receive() finds the end behind them.
void FrameStream::end_sending(std::string reason) {
  send_error_ = std::move(reason);
  queue_.clear();
  ::shutdown(fd_, SHUT_RDWR);
}

void FrameStream::shutdown_send() { ::shutdown(fd_, SHUT_WR); }

std::size_t FrameStream::unacknowledged() const {
  int bytes = 0;
  return ended() || ioctl(fd_, SIOCOUTQ, &bytes) != 0 ? 0 : static_cast<std::size_t>(bytes);
}

std::uint64_t FrameStream::acknowledged() const {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (ended() || getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return size >= offsetof(tcp_info, tcpi_bytes_acked) + sizeof info.tcpi_bytes_acked ? info.tcpi_bytes_acked : 0;
}

// Reads the rest of the payload directly to its place, and what follows it into the read-ahead buffer.
FrameStream::ReadResult FrameStream::read_more() {
  if (begin_ == end_) begin_ = end_ = 0;
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  iovec parts[2];
  std::size_t requested = 0;
  int count = 0;
  const std::size_t direct = in_payload_ ? missing_ : 0;
  if (direct > 0) parts[count++] = {payload_, direct};
  parts[count++] = {buffer_.data() + end_, buffer_.size() - end_};
  for (int i = 0; i < count; ++i) requested += parts[i].iov_len;
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = static_cast<std::size_t>(count);
  const ssize_t got = ::recvmsg(fd_, &message, MSG_DONTWAIT);
  if (got < 0) {
    const int error = errno;
    if (!is_temporary(error)) end(std::strerror(error));
    return {false, error != EINTR};
  }
  if (got == 0) {
    end(send_error_.empty() ? kClosedByPeer : send_error_);
    return {false, true};
  }
  const auto bytes = static_cast<std::size_t>(got);
  const std::size_t placed = std::min(bytes, direct);
  payload_ += placed;
  missing_ -= placed;
  end_ += bytes - placed;
  return {true, bytes < requested};
}

// Parses the read-ahead buffer as far as it goes; false if a frame is rejected.
bool FrameStream::parse(FrameSink& sink) {
  for (;;) {
    if (in_payload_) {
      const std::size_t size = std::min(missing_, end_ - begin_);
      if (size > 0) std::memcpy(payload_, buffer_.data() + begin_, size);
      payload_ += size;
      missing_ -= size;
      begin_ += size;
      if (missing_ > 0) return true;
      in_payload_ = false;
      sink.on_frame(header_, payload_ - header_.bytes);
    }
    if (end_ - begin_ < sizeof header_) return true;
    std::memcpy(&header_, buffer_.data() + begin_, sizeof header_);
    begin_ += sizeof header_;
    payload_ = sink.payload_buffer(header_, text_);
    if (!payload_) return false;
    missing_ = header_.bytes;
    in_payload_ = true;
  }
}

void FrameStream::receive(FrameSink& sink) {
  bool drained = false;
  for (std::size_t budget = 0; !ended() && !drained && budget < kMaxReceive;) {
    const std::size_t before = missing_ + buffer_.size() - end_ + begin_;
    const ReadResult read = read_more();
    drained = read.drained;
    if (!read.any) continue;
    budget += before - (missing_ + buffer_.size() - end_ + begin_);
    if (!parse(sink)) end("it sent an invalid frame");
  }
}

}  // namespace dtcomm
