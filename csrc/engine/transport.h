// The interface between an interpreter and what connects its rank to the others: the peers' regions, which it reads,
// and the calls by which it publishes. PeerSet implements it for processes, SimulatedWorld for ranks in one thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/process_page.h"
#include "engine/shm_layout.h"

namespace dtcomm {

class Tuner;

class Transport {
 public:
  virtual ~Transport() = default;

  int rank = 0;
  int ranks = 1;
  std::vector<PeerView> peers;       // by rank, own included
  std::vector<EmulatedLink*> links;  // by rank, null for peers that have none; empty if no link is emulated
  bool has_latency = false;          // payloads take time to arrive, so more pieces are kept in flight
  bool wide_area = false;            // so much time that as many are as there are slots
  Tuner* tuner = nullptr;            // null: operations are carried out as planned, and nothing is tried
  // What an operation leaves to the next one: the sequence number of its first piece, a number of pieces that every
  // peer is known to have finished, and when the last messages began, the latest first.
  std::uint64_t next_seq = 0;
  std::uint64_t pieces_done_by_all = 0;
  std::array<std::uint64_t, kMessagesTimed> last_begins_ns{};

  virtual void publish_flag(std::size_t index, std::uint64_t seq, std::uint64_t operation, std::uint32_t checksum) = 0;
  virtual void publish_pieces_done(std::uint64_t pieces) = 0;
  // Sends a box whose flag has been published to those peers that do not map this rank's memory. It lies `slot_offset`
  // bytes into its slot.
  virtual void send_box(const std::vector<int>& /*to*/, std::size_t /*index*/, std::size_t /*slot_offset*/,
                        const std::uint8_t* /*data*/, std::size_t /*bytes*/) {}
  // A peer to which boxes of the slot of this piece are still being sent, so that the slot must not be written; -1 if
  // there is none.
  virtual int peer_being_sent(std::uint64_t /*seq*/) { return -1; }
  // Wakes peers that may sleep, after something else has changed for which they may wait.
  virtual void wake_peers() {}
  // Nanoseconds; simulated ranks have a clock of their own.
  virtual std::uint64_t now() const { return now_ns(); }
  // The address, in this process, of a shared tensor of a peer.
  virtual std::uint8_t* map_tensor(int peer, const SharedTensorLocation& location, std::size_t bytes) = 0;
  // Copies from a peer's private memory. Throws Error if that is impossible.
  virtual void read_memory(int peer, std::uint64_t address, std::uint8_t* out, std::size_t bytes) = 0;
  // Throws Error if the peer's process has ended, in which case its memory may not have been its own when it was read.
  virtual void require_alive(int peer) { static_cast<void>(peer); }

  const PeerView& peer(int r) const { return peers[static_cast<std::size_t>(r)]; }
  const PeerView& own() const { return peer(rank); }
  EmulatedLink* link_to(int r) const { return links.empty() ? nullptr : links[static_cast<std::size_t>(r)]; }
};

}  // namespace dtcomm
