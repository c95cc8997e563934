// One connection to a peer: frames go in and out whole, and nothing here ever waits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

namespace dtcomm {

// What goes before every payload. Both ends are of one kind of machine, as their payloads are.
struct FrameHead {
  std::uint32_t kind = 0;
  std::uint32_t bytes = 0;  // of the payload behind it
  std::array<std::uint64_t, 5> words{};
};

class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // Where the payload of a frame belongs; null refuses the frame, which ends the connection.
  virtual std::uint8_t* place(const FrameHead& head) = 0;
  // The payload is there.
  virtual void arrived(const FrameHead& head) = 0;
};

class Stream {
 public:
  // Owns the connected socket. A forked child does not have it: who talks to this process sees it end with it.
  explicit Stream(int fd);
  ~Stream();
  Stream(const Stream&) = delete;

  int fd() const { return fd_; }
  // Queues a frame; `data` stays as it is until it has left, a `text` is copied.
  void put(const FrameHead& head, const std::uint8_t* data);
  void put(FrameHead head, std::string text);
  // Hands over to the kernel what it takes.
  void flush();
  bool pending() const { return !queue_.empty(); }
  // Reads what there is; true where anything came.
  bool receive(FrameSink& sink);
  // The connection has ended, or broke: `why` says how.
  bool ended() const { return ended_; }
  const std::string& why() const { return why_; }
  // No more will be sent; what the kernel has still leaves. `unsent` counts those bytes.
  void shut();
  std::size_t unsent() const;

 private:
  struct Frame {
    FrameHead head;
    std::string text;
    const std::uint8_t* data = nullptr;
    std::size_t size() const { return sizeof head + head.bytes; }
  };
  void end(std::string why);
  bool read_more(bool& drained);
  bool take(FrameSink& sink);

  static constexpr std::size_t kAhead = 16 * 1024;
  int fd_;
  bool ended_ = false;
  std::string why_;
  std::deque<Frame> queue_;
  std::size_t left_ = 0;                    // bytes of the first frame that have left
  std::array<std::uint8_t, kAhead> ahead_;  // read, and not yet made anything of
  std::size_t begin_ = 0, end_ = 0;
  bool inside_ = false;  // a payload is coming in
  FrameHead head_;
  std::uint8_t* payload_ = nullptr;
  std::size_t missing_ = 0;
};

// Closes a descriptor in every child that this process forks: a copy there would keep the connection open when this
// process ends.
void close_in_children(int fd);
// False where this process is such a child, and the number may be another file's by now.
bool forget_in_children(int fd);

}  // namespace dtcomm
