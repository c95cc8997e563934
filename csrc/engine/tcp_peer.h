// A peer whose memory cannot be shared: a copy of its area, which its frames keep up to date, and our words to it.
// What arrives is seen by the machines as what a peer in the same memory publishes.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/shm_layout.h"
#include "net/frame_stream.h"

namespace dtcomm {

class Remote final : private FrameSink {
 public:
  // Owns the connected socket. `layout` is that of the peer's area, `reader` this rank.
  Remote(int fd, const AreaLayout& layout, int reader);
  ~Remote() override;
  Remote(const Remote&) = delete;

  const PeerView& view() const { return view_; }
  Stream& stream() { return stream_; }
  const Stream& stream() const { return stream_; }

  // What a flag of ours says and the payload that it speaks of, which lies `slot_offset` bytes into its slot;
  // `first_ns` is when an emulated link delivers the first byte.
  void send_box(std::size_t index, const Flag& flag, std::uint64_t first_ns, const std::uint8_t* data,
                std::size_t slot_offset, std::size_t bytes);
  // Counted in with what is sent next: alone only where the peer could come to wait for it.
  void send_done(std::uint64_t pieces);
  // What we are about to do, up to operation `number`, where it was not said before.
  void send_headers(const AreaHead& own, std::uint64_t number);
  void send_waiting(int rank);
  void send_failure(const Failure& failure);
  void send_closed();

  // Reads what there is; true where anything came.
  bool receive();

 private:
  std::uint8_t* place(const FrameHead& head) override;
  void arrived(const FrameHead& head) override;

  AreaLayout layout_;
  std::size_t reader_;
  void* memory_;
  PeerView view_;
  Stream stream_;
  std::uint64_t done_said_ = 0;
  std::uint64_t headers_said_ = 0;
  char text_[sizeof(Failure::text)];  // of the frame that is coming in
};

}  // namespace dtcomm
