#include "net/frame_stream.h"

#include <linux/sockios.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace dtcomm {
namespace {

constexpr std::size_t kFramesAtOnce = 32;
constexpr std::size_t kBytesAtOnce = 4 * 1024 * 1024;  // of one peer, before the others have their turn

struct Inherited {
  std::mutex mutex;
  std::vector<int> fds;
};

Inherited& inherited() {
  static auto* const kept = [] {
    auto* made = new Inherited;  // never freed: a child may be forked at the very end
    pthread_atfork([] { inherited().mutex.lock(); }, [] { inherited().mutex.unlock(); },
                   [] {
                     for (const int fd : inherited().fds) ::close(fd);
                     inherited().fds.clear();
                     inherited().mutex.unlock();
                   });
    return made;
  }();
  return *kept;
}

bool later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

void close_in_children(int fd) {
  Inherited& kept = inherited();
  const std::lock_guard<std::mutex> lock(kept.mutex);
  kept.fds.push_back(fd);
}

bool forget_in_children(int fd) {
  Inherited& kept = inherited();
  const std::lock_guard<std::mutex> lock(kept.mutex);
  const auto found = std::find(kept.fds.begin(), kept.fds.end(), fd);
  if (found == kept.fds.end()) return false;
  kept.fds.erase(found);
  return true;
}

Stream::Stream(int fd) : fd_(fd) { close_in_children(fd); }

Stream::~Stream() {
  if (forget_in_children(fd_)) ::close(fd_);
}

void Stream::put(const FrameHead& head, const std::uint8_t* data) {
  if (!ended_) queue_.push_back({head, {}, data});
}

void Stream::put(FrameHead head, std::string text) {
  if (ended_) return;
  head.bytes = static_cast<std::uint32_t>(text.size());
  queue_.push_back({head, std::move(text), nullptr});
}

void Stream::flush() {
  while (!queue_.empty()) {
    iovec parts[2 * kFramesAtOnce];
    std::size_t count = 0;
    std::size_t skip = left_;
    std::size_t whole = 0;
    for (std::size_t i = 0; i < std::min(queue_.size(), kFramesAtOnce); ++i) {
      Frame& frame = queue_[i];
      const void* const starts[2] = {&frame.head,
                                     frame.data ? static_cast<const void*>(frame.data) : frame.text.data()};
      const std::size_t sizes[2] = {sizeof frame.head, frame.head.bytes};
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
      // What the peer said with its last breath is still to be read: receive() finds the end.
      if (!later(errno)) queue_.clear();
      return;
    }
    left_ += static_cast<std::size_t>(sent);
    while (!queue_.empty() && left_ >= queue_.front().size()) {
      left_ -= queue_.front().size();
      queue_.pop_front();
    }
    if (static_cast<std::size_t>(sent) < whole) return;
  }
}

void Stream::end(std::string why) {
  ended_ = true;
  why_ = std::move(why);
  queue_.clear();
  ::shutdown(fd_, SHUT_RDWR);  // the peer finds out too
}

void Stream::shut() { ::shutdown(fd_, SHUT_WR); }

std::size_t Stream::unsent() const {
  int bytes = 0;
  return ended_ || ioctl(fd_, SIOCOUTQ, &bytes) != 0 ? 0 : static_cast<std::size_t>(bytes);
}

// The payload straight to where it belongs, and what is behind it into the space for what is read ahead.
bool Stream::read_more(bool& drained) {
  if (begin_ == end_) begin_ = end_ = 0;
  if (begin_ > 0) {
    std::memmove(ahead_.data(), ahead_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  iovec parts[2];
  std::size_t room = 0;
  int count = 0;
  const std::size_t direct = inside_ ? missing_ : 0;
  if (direct > 0) parts[count++] = {payload_, direct};
  parts[count++] = {ahead_.data() + end_, ahead_.size() - end_};
  for (int i = 0; i < count; ++i) room += parts[i].iov_len;
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = static_cast<std::size_t>(count);
  const ssize_t got = ::recvmsg(fd_, &message, MSG_DONTWAIT);
  if (got < 0) {
    if (!later(errno)) end(std::strerror(errno));
    drained = errno != EINTR;
    return false;
  }
  if (got == 0) {
    end("closed by the peer");
    drained = true;
    return false;
  }
  const auto bytes = static_cast<std::size_t>(got);
  const std::size_t placed = std::min(bytes, direct);
  payload_ += placed;
  missing_ -= placed;
  end_ += bytes - placed;
  drained = bytes < room;
  return true;
}

// Makes of what was read ahead what can be made of it; false where a frame is refused.
bool Stream::take(FrameSink& sink) {
  for (;;) {
    if (inside_) {
      const std::size_t size = std::min(missing_, end_ - begin_);
      if (size > 0) std::memcpy(payload_, ahead_.data() + begin_, size);
      payload_ += size;
      missing_ -= size;
      begin_ += size;
      if (missing_ > 0) return true;
      inside_ = false;
      sink.arrived(head_);
    }
    if (end_ - begin_ < sizeof head_) return true;
    std::memcpy(&head_, ahead_.data() + begin_, sizeof head_);
    begin_ += sizeof head_;
    payload_ = sink.place(head_);
    if (!payload_) return false;
    missing_ = head_.bytes;
    inside_ = true;
  }
}

bool Stream::receive(FrameSink& sink) {
  bool any = false;
  bool drained = false;
  for (std::size_t budget = 0; !ended_ && !drained && budget < kBytesAtOnce;) {
    const std::size_t before = missing_ + ahead_.size() - end_ + begin_;
    if (!read_more(drained)) continue;
    budget += before - (missing_ + ahead_.size() - end_ + begin_);
    any = true;
    if (!take(sink)) end("it sent what it must not");
  }
  return any;
}

}  // namespace dtcomm
