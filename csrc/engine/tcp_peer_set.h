// The peers of a communicator that are reached over TCP, and waiting for their frames.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/tcp_peer.h"
#include "net/epoll_set.h"

namespace dtcomm {

// Thread-safe: the thread that drives operations, one that fails, and one that closes may call it at once. Every method
// returns at once if there are no peers.
class TcpPeerSet {
 public:
  // Adds a peer before the first use; takes ownership of the connected socket.
  void add(int peer, int fd, const RegionLayout& layout, const RegionHeader& own);
  bool empty() const { return peers_.empty(); }
  // Null for peers that share memory.
  const TcpPeer* find(int peer) const;
  // The descriptor that is readable while frames wait to be read; -1 if there are no peers.
  int epoll_fd() const { return epoll_.fd(); }

  // Reads the frames that have arrived, and passes queued ones to the kernel.
  void receive();
  // Passes queued frames to the kernel; true if it did not accept all. epoll_fd() then reports when it accepts more.
  bool flush();
  void send_box(const std::vector<int>& to, const PeerView& own, std::uint64_t last_operation, std::size_t index,
                std::size_t slot_offset, const std::uint8_t* data, std::size_t bytes);
  void send_pieces_done(std::uint64_t pieces);
  // Sends what peers in shared memory read in this rank's region: the op headers up to `last_operation`, and the rank
  // that it waits for. Does nothing if that was sent a moment ago, unless `force` is set.
  void send_waiting_for(const RegionHeader& own, std::uint64_t last_operation, int rank, bool force);
  void send_failure(const RegionHeader& own, std::uint64_t last_operation);
  // Closing: start_goodbye() tells the peers that this rank closes; goodbye_pending() is to be called again while it
  // returns true, which it does until the peers have received what was sent last, or at most two seconds;
  // end_goodbye() ends the sending direction.
  void start_goodbye(bool failed);
  bool goodbye_pending();
  void end_goodbye();
  void close();

 private:
  template <class Action>
  void for_each_locked(Action action);

  std::mutex mutex_;
  std::vector<std::unique_ptr<TcpPeer>> peers_;  // by rank; empty if there are none
  EpollSet epoll_;
  std::uint64_t wait_sent_ns_ = 0;
  std::uint64_t goodbye_deadline_ns_ = 0;
};

}  // namespace dtcomm
