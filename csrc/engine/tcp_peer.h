// A peer on another host: a local copy of its shared region, which the frames that it sends keep up to date, and the
// frames that this rank sends to it. Interpreters read the copy as they read the region of a peer in shared memory.
// A frame with a value that no correct peer sends ends the connection.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/shm_layout.h"
#include "net/frame_stream.h"

namespace dtcomm {

class TcpPeer final : private FrameSink {
 public:
  // Takes ownership of the connected socket. `layout` is that of the peer's region, `own` this rank's header.
  TcpPeer(int fd, const RegionLayout& layout, const RegionHeader& own);
  ~TcpPeer() override;
  TcpPeer(const TcpPeer&) = delete;

  const PeerView& view() const { return view_; }
  FrameStream& stream() { return stream_; }
  const FrameStream& stream() const { return stream_; }

  // Sends a flag of this rank and the payload of its box, which lies `slot_offset` bytes into its slot. `first_ns` is
  // when an emulated link delivers the first byte.
  void send_box(std::size_t index, const BoxFlag& flag, std::uint64_t first_ns, const std::uint8_t* data,
                std::size_t slot_offset, std::size_t bytes);
  // Sends the number of finished pieces. Small advances are skipped: the peer cannot be waiting for them yet.
  void send_pieces_done(std::uint64_t pieces);
  // Sends the op headers up to operation `number` that were not sent before.
  void send_headers(const RegionHeader& own, std::uint64_t number);
  void send_waiting_for(int rank);
  void send_failure(const FailureRecord& failure);
  void send_closed();

  // Reads all frames that have arrived; true if there were any.
  bool receive() { return stream_.receive(*this); }

 private:
  std::uint8_t* payload_buffer(const FrameHeader& frame) override;
  void on_frame(const FrameHeader& frame) override;

  bool is_valid_box(const FrameHeader& frame) const;
  // The pieces of its operations that the peer can have begun: it begins one when all ranks are done with the piece
  // that used the slot before.
  std::uint64_t max_pieces_begun() const { return own_.pieces_done.load(std::memory_order_relaxed) + kSlots; }

  RegionLayout layout_;
  const RegionHeader& own_;
  void* memory_;
  PeerView view_;
  std::vector<ArrivedBytes> arrived_;  // by flag
  FrameStream stream_;
  std::uint64_t pieces_done_sent_ = 0;
  std::uint64_t headers_sent_ = 0;
  char text_[sizeof(FailureRecord::text)];  // of the frame that is being received
};

}  // namespace dtcomm
