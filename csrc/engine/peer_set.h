// The ranks of one communicator: this rank's shared region, the mapped regions and processes of the peers of this host,
// connections to the others over TCP or UCX, and emulated links. It is the Transport of the communicator's
// interpreters.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "engine/call.h"
#include "engine/remote_peer_set.h"
#include "engine/transport.h"

namespace dtcomm {

// How a rank is reached and named.
struct PeerAddress {
  int pid = 0;
  int page_fd = -1;
  std::uint64_t page_token = 0;
  std::uint64_t page_address = 0;  // in that process
  int region_fd = -1;
  std::uint64_t region_token = 0;
  std::vector<int> sockets;  // connected to it, if its memory cannot be mapped; the communicator takes ownership
  bool other_host = false;   // it is on another host
  std::string name;          // "rank 3 (host a, pid 17)"
};

struct PeerSetOptions {
  int rank = 0;
  int ranks = 1;
  std::uint32_t max_boxes = 0;
  std::size_t slot_bytes = 512 * 1024;
  LinkRate inside, between;  // links to emulate, inside the host and between hosts; off by default
  bool wide_area = false;    // peers are so far away that as many pieces as there are slots are to be in flight
};

// What a rank sees of another one in its shared region.
struct PeerSnapshot {
  std::uint64_t last_operation = 0;  // the last one that it began
  std::string text;                  // what that is
  std::uint64_t pieces_done = 0;
  int waiting_for = -1;  // when it was last asleep in that operation, else -1
  bool alive = true;
  bool closed = false;
};

// A thread that waits for peers in shared memory and for others sleeps on the sockets, and peers in memory cannot wake
// it: it looks again after this time.
constexpr std::uint64_t kMixedSleepNs = 200 * 1000;

class PeerSet final : public Transport {
 public:
  explicit PeerSet(const PeerSetOptions& options);
  ~PeerSet() override { close(); }
  PeerSet(const PeerSet&) = delete;

  PeerAddress address() const;
  // Maps every peer's region and page. Throws std::system_error or std::runtime_error if a peer cannot be reached.
  void attach(const std::vector<PeerAddress>& addresses);
  // Unmaps everything.
  void close();

  // Whether this rank may copy out of its peers' private memory.
  Status can_single_copy() const;
  std::uint64_t single_copy_bytes() const { return single_copy_bytes_.load(std::memory_order_relaxed); }
  std::string name(int peer) const;
  RegionHeader& own_header() { return *own_.header; }
  std::vector<PeerSnapshot> snapshots() const;
  // The rank that a rank waited for when it was last asleep; -1 if it waited for none, or its region holds no rank.
  int awaited_by(int peer) const;

  // Announces an operation in the op headers; returns its fingerprint.
  std::uint64_t announce_operation(const Call& call, std::uint64_t number);
  // Whether the peer's process or connection has ended, waiting at most `wait_ms` for it.
  bool has_ended(int peer, int wait_ms = 0) const;
  // Null for peers that share memory.
  const RemotePeer* remote_peer(int peer) const { return remote_.find(peer); }
  bool has_remote_peers() const { return !remote_.empty(); }
  // Some peers share memory, others do not.
  bool is_mixed() const { return mixed_; }
  int epoll_fd() const { return remote_.epoll_fd(); }
  // UCX; see RemotePeerSet.
  std::string make_ucx_address() { return remote_.make_ucx_address(); }
  void connect_ucx(const std::vector<std::string>& addresses) { remote_.connect_ucx(addresses, names_); }
  bool ucx_is_connected() { return remote_.ucx_is_connected(names_); }
  std::vector<std::string> ucx_lanes() { return remote_.ucx_lanes(); }
  // To be called before a sleep on epoll_fd(); false if something is there already.
  bool arm() { return remote_.arm(); }
  RemotePeerSet& remote() { return remote_; }

  // Receives what has arrived over sockets, UCX and links; call it before an interpreter advances.
  void receive();
  // Sends queued frames; true if some are left.
  bool flush() { return remote_.flush(); }
  // Publishes to the other peers what those in shared memory read in this rank's region.
  void send_waiting_for(int peer, bool force = false) { remote_.send_waiting_for(last_announced_, peer, force); }
  void send_failure() { remote_.send_failure(last_announced_); }
  // Tells the peers that this rank is closing its communicator; see RemotePeerSet.
  void start_goodbye(bool failed);
  bool goodbye_pending() { return remote_.goodbye_pending(); }
  void end_goodbye() { remote_.end_goodbye(); }
  // How long a blocked thread may sleep, at most `limit`: less if an emulated link is about to deliver.
  std::uint64_t max_sleep_ns(std::uint64_t limit) const;
  // Sleeps until a peer wakes this process, a frame arrives or `timeout_ns` has passed; `seen` as in WakeupFutex.
  void sleep(WakeupFutex& futex, std::uint32_t seen, std::uint64_t timeout_ns);

  void publish_flag(std::size_t index, std::uint64_t seq, std::uint64_t operation, std::uint32_t checksum) override;
  void publish_pieces_done(std::uint64_t pieces) override;
  void send_box(const std::vector<int>& to, std::size_t index, std::size_t slot_offset, const std::uint8_t* data,
                std::size_t bytes) override {
    remote_.send_box(to, own_, last_announced_, index, slot_offset, data, bytes);
  }
  void wake_peers() override;
  int peer_being_sent(std::uint64_t seq) override;
  std::uint8_t* map_tensor(int peer, const SharedTensorLocation& location, std::size_t bytes) override;
  void read_memory(int peer, std::uint64_t address, std::uint8_t* out, std::size_t bytes) override;
  void require_alive(int peer) override;

 private:
  void map_peer(int peer, const PeerAddress& address);
  [[noreturn]] void throw_peer_lost(int peer) const;

  RegionLayout layout_;
  std::unique_ptr<EmulatedLink> inside_, between_;
  std::uint64_t token_;
  MemfdMapping region_;
  PeerView own_;
  std::vector<MemfdMapping> peer_regions_;
  std::vector<std::unique_ptr<PeerProcess>> processes_;  // null for this rank and those that share no memory
  std::vector<std::string> names_;
  RemotePeerSet remote_;
  bool mixed_ = false;
  std::uint64_t last_announced_ = 0;  // operation
  std::atomic<std::uint64_t> single_copy_bytes_{0};
};

}  // namespace dtcomm
