// The peers of a communicator that are reached over TCP or UCX, and waiting for their frames.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/remote_peer.h"
#include "net/epoll_set.h"

namespace dtcomm {

// Thread-safe: the thread that drives operations, one that fails, and one that closes may call it at once. Every method
// returns at once if there are no peers.
class RemotePeerSet {
 public:
  // Adds a peer before the first use; takes ownership of the connected sockets.
  void add(int peer, const std::vector<int>& fds, const RegionLayout& layout, const RegionHeader& own);
  // Makes this rank's endpoint of UCX; returns its address.
  std::string make_ucx_address();
  // Sends payloads to the peers that were added through UCX. `addresses` and `names`, which errors use, are by rank.
  void connect_ucx(const std::vector<std::string>& addresses, const std::vector<std::string>& names);
  // Whether all peers have connected to this rank through UCX, and its own connections are ready.
  bool ucx_is_connected(const std::vector<std::string>& names);
  // The transports and devices of UCX's lanes to the peers, each once.
  std::vector<std::string> ucx_lanes();
  bool empty() const { return peers_.empty(); }
  // Null for peers that share memory.
  const RemotePeer* find(int peer) const;
  // The descriptor that is readable while frames wait to be read; -1 if there are no peers.
  int epoll_fd() const { return epoll_.fd(); }

  // Making connections anew, by another thread. All of this may be called at any time, also after close().
  // From now on `event_fd`, an eventfd that this object duplicates, is written to when connections have ended.
  // Throws std::system_error if there is no descriptor for it.
  void allow_restoring(int event_fd);
  struct LostConnection {
    int peer;
    StreamBundle::LostStream stream;
  };
  std::vector<LostConnection> lost_connections();
  // As the methods of RemotePeer and StreamBundle.
  bool restore(int peer, std::size_t number, std::uint32_t generation, int fd);
  void end_connection(int peer, std::size_t number, std::uint32_t generation);
  void give_up(int peer, const std::string& reason);
  // How many connections have ended and are missing, and how often one was made anew.
  std::pair<std::size_t, std::uint64_t> restoring_counts();
  // StreamBundle::measured_rate() by rank; 0 for this rank and for peers that share memory.
  std::vector<double> measured_rates();

  // Reads the frames that have arrived, and passes queued ones to the kernel.
  void receive();
  // Sends queued frames; true if some are left. epoll_fd() then reports when it can go on.
  bool flush();
  // To be called before a sleep on epoll_fd(); false if something is there already.
  bool arm();
  // A peer to which some of these bytes, a part of this rank's slots, are still being sent; -1 if there is none.
  int awaited_by_sends(const std::uint8_t* begin, const std::uint8_t* end);
  void send_box(const std::vector<int>& to, const PeerView& own, std::uint64_t last_operation, std::size_t index,
                std::size_t slot_offset, const std::uint8_t* data, std::size_t bytes);
  void send_pieces_done(std::uint64_t pieces);
  // Sends what peers in shared memory read in this rank's region: the op headers up to `last_operation`, and the rank
  // that it waits for. Does nothing if that was sent a moment ago, unless `force` is set.
  void send_waiting_for(std::uint64_t last_operation, int rank, bool force);
  void send_failure(std::uint64_t last_operation);
  // Closing: start_goodbye() tells the peers that this rank closes; goodbye_pending() is to be called again while it
  // returns true, which it does until the peers have received what was sent last, or at most two seconds;
  // end_goodbye() ends the sending direction.
  void start_goodbye(bool failed);
  bool goodbye_pending();
  void end_goodbye();
  void close();

 private:
  void receive_locked();
  void receive_from_sockets();
  RemotePeer* find_locked(int peer);
  void notify_ended(RemotePeer& peer);
  void receive_from_socket(std::size_t peer, std::size_t stream);
  // The number of a socket in the set of sockets; that of UCX follows the ranks' first ones.
  int socket_number(std::size_t peer, std::size_t stream) const {
    return static_cast<int>(stream * (peers_.size() + 1) + peer);
  }
  template <class Action>
  void for_each_locked(Action action);

  std::mutex mutex_;
  std::vector<std::unique_ptr<RemotePeer>> peers_;  // by rank; empty if there are none
  // Null without UCX, which moves the frames of all its channels at once and wakes this rank by one descriptor. So this
  // object, and not a RemotePeer, asks it to progress, to arm and to flush.
  std::unique_ptr<UcxWorker> unconnected_ucx_, ucx_;
  EpollSet epoll_;
  bool has_parallel_sockets_ = false;
  bool keeps_order_ = true;  // every channel does
  int ended_fd_ = -1;        // an eventfd
  int polls_ = 0;            // of UCX since the sockets were read
  std::uint64_t wait_sent_ns_ = 0;
  std::uint64_t goodbye_deadline_ns_ = 0;
};

}  // namespace dtcomm
