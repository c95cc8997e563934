// A peer on another host: a local copy of its shared region, which the frames that it sends keep up to date, and the
// frames that this rank sends to it. Interpreters read the copy as they read the region of a peer in shared memory.
// A frame with a value that no correct peer sends ends the connection.
//
// Payloads and what belongs to them go through a channel (net/frame_channel.h): the peer's sockets, or UCX. Every peer
// has sockets, which end at once when its process does. With UCX there is one, which carries what a rank says while it
// waits, fails or closes.
//
// A peer that is far away has several sockets (stream_bundle.h). The peer is lost with its last socket, unless sockets
// are made anew (StreamBundle::allow_restoring()): then it is cut off until one is there or StreamBundle::give_up() is
// called.
//
// RemotePeerSet's mutex guards an object of this class. Interpreters read view() without it, as they read a region that
// another process writes. So do has_ended(), is_cut_off() and end_reason(), which threads call that look for the end of
// a peer.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/shm_layout.h"
#include "engine/stream_bundle.h"
#include "net/ucx.h"

namespace dtcomm {

class RemotePeer final : private FrameSink {
 public:
  // Takes ownership of the connected sockets, at least one. `layout` is that of the peer's region, `own` this rank's
  // header. Throws std::invalid_argument if there are several and a link is emulated.
  RemotePeer(const std::vector<int>& fds, const RegionLayout& layout, const RegionHeader& own);
  ~RemotePeer() override;
  RemotePeer(const RemotePeer&) = delete;

  const PeerView& view() const { return view_; }
  StreamBundle& sockets() { return sockets_; }
  // What carries payloads.
  const FrameChannel& channel() const { return *channel_; }
  // Sends payloads through UCX from now on. `worker` must be destroyed before this object. Throws std::invalid_argument
  // if there are several sockets.
  void connect(UcxWorker& worker, const std::string& address);
  // Whether the peer has connected to this rank through UCX.
  bool has_greeted() const { return greeted_; }
  // Whether the connection has ended although the peer has not closed it, and how.
  bool has_ended() const;
  const std::string& end_reason() const;
  // Whether no stream is left although the peer has not closed, and one may still be made.
  bool is_cut_off() const;
  // For a report: when something came from the peer, of which note_heard() was told by the next call of it.
  std::uint64_t heard_ns() const { return heard_ns_.load(std::memory_order_relaxed); }
  void note_heard(std::uint64_t now) {
    if (heard_) heard_ns_.store(now, std::memory_order_relaxed);
    heard_ = false;
  }

  // The streams to be made anew; none if the peer closes or is given up.
  std::vector<StreamBundle::LostStream> lost_streams() const;
  // Puts a connected socket in the place of a stream and takes ownership of it. False, and the caller keeps it, if
  // the stream's generation is not below `generation` or the peer has been given up.
  bool restore(std::size_t number, std::uint32_t generation, int fd);
  // The peer has lost this stream, which may still look alive at this end.
  void end_stream(std::size_t number, std::uint32_t generation);

  // Sends a flag of this rank and the payload of its box, which lies `slot_offset` bytes into its slot. `first_ns` is
  // when an emulated link delivers the first byte.
  void send_box(std::size_t index, const BoxFlag& flag, std::uint64_t first_ns, const std::uint8_t* data,
                std::size_t slot_offset, std::size_t bytes);
  // Sends the number of finished pieces. Small advances are skipped: the peer cannot be waiting for them yet.
  void send_pieces_done(std::uint64_t pieces);
  // Sends this rank's op headers up to operation `number` that were not sent before.
  void send_headers(std::uint64_t number);
  void send_waiting_for(int rank);
  // Sends the failure in this rank's header.
  void send_failure();
  void send_closed();
  // Sends what was queued, as far as that is possible now; true if something is left.
  bool flush();

  // Reads all frames that have arrived at a socket. Those of UCX arrive while its worker makes progress. True if the
  // socket has ended; what was sent over it then goes over the others, where that is necessary.
  bool receive(std::size_t stream);
  // Learns of the peer's failure or end if everything has arrived that it sent before. To be called when frames may
  // have arrived.
  void read_last_words();

 private:
  std::uint8_t* payload_buffer(const FrameHeader& frame, std::uint8_t* text) override;
  void on_frame(const FrameHeader& frame, const std::uint8_t* payload) override;
  void on_box(const FrameHeader& frame);
  bool handle_ended_streams();
  void repeat_short_frames();

  bool is_valid_box(const FrameHeader& frame) const;
  // The pieces of its operations that the peer can have begun: it begins one when all ranks are done with the piece
  // that used the slot before.
  std::uint64_t max_pieces_begun() const { return own_.pieces_done.load(std::memory_order_relaxed) + kSlots; }

  RegionLayout layout_;
  const RegionHeader& own_;
  void* memory_;
  PeerView view_;
  std::vector<ArrivedBytes> arrived_;  // by flag
  StreamBundle sockets_;
  FrameChannel* channel_ = &sockets_;
  bool greeted_ = false;
  bool heard_ = true;  // since note_heard()
  std::atomic<std::uint64_t> heard_ns_{0};
  std::atomic<bool> says_goodbye_{false};  // also read by threads that list the peers
  std::uint64_t boxes_sent_ = 0, boxes_received_ = 0;
  std::uint64_t pieces_done_sent_ = 0;
  std::uint64_t headers_sent_ = 0;
  bool failure_sent_ = false, closed_sent_ = false;
  // The peer has said that it fails or closes after this many boxes; kNever: it has not.
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  std::uint64_t fails_after_ = kNever, closes_after_ = kNever;
  std::uint64_t fails_at_ns_ = 0;  // when this rank fails even if some boxes have not arrived
  FrameHeader failure_;
  std::string failure_text_;
};

}  // namespace dtcomm
