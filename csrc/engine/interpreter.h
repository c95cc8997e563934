// The interpreter: one operation on one rank as a resumable state machine. It never waits; whoever drives it
// (communicator, progress thread, runtime/local) decides what to do while it is blocked.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "engine/cache_line_probe.h"
#include "engine/phase_times.h"
#include "engine/plan.h"
#include "engine/shm_layout.h"

namespace dtcomm {

struct Pointers {
  const std::uint8_t* in = nullptr;
  std::uint8_t* out = nullptr;  // nullptr where this rank has no output
  float* residual = nullptr;
};

// What a rank does on its own, in the order of the operations: no other rank waits for it but by way of the operation.
using Task = std::function<void(const Kernels&)>;

// What follows where elements of the (only) output are final, and the memory that it touches besides.
struct Arrival {
  std::function<void(const Kernels&, std::size_t at, std::size_t numel)> take;  // each element once
  std::vector<std::pair<const void*, std::size_t>> touches;                     // bytes
};

struct Call {
  std::shared_ptr<const Plan> plan;
  std::vector<Pointers> segments;
  std::uint64_t seed = 0;
  const Kernels* kernels = nullptr;
  std::vector<Task> before, after;  // the operation's first instruction and its last one
  Arrival arrival;
  std::uint64_t agreed = 0;  // a number besides the plan that has to be the same on all ranks
  // Set where the (only) input lies in memory that peers can map: slot, id and byte offset in this process's regions.
  std::int64_t region = -1;
  std::uint64_t region_id = 0;
  std::uint64_t region_offset = 0;
  // Set where peers may pull the (only) input from this process's memory: its address.
  std::uint64_t address = 0;
};

// Whether two calls, in this order, touch no byte in common.
bool disjoint(const Call& one, const Call& other);

// What a machine sees of its communicator, and how it makes itself seen.
class Fabric {
 public:
  virtual ~Fabric() = default;
  int rank = 0;
  int ranks = 1;
  std::vector<PeerView> peers;    // own included
  std::uint64_t next_piece = 0;   // sequence number of the next operation's first piece
  bool stream_staging = false;    // non-temporal stores into slots: cores without a common cache
  bool probes = false;            // operations measure the round trip now and then and choose the staging by it
  std::uint64_t until_probe = 0;  // what may be moved before the next probe
  double round_trip_ns = 0;
  std::vector<Link*> links;     // emulated, by peer: payloads arrive when they could have come over it; or empty
  bool wired = false;           // payloads take their time to arrive: more pieces are under way
  std::uint64_t seen_done = 0;  // every peer has finished at least this many pieces (may lag)

  virtual void publish_flag(std::size_t index, std::uint64_t seq, std::uint64_t operation, std::uint32_t checksum) = 0;
  virtual void publish_done(std::uint64_t pieces) = 0;
  // A box whose flag has been published, for those peers that do not see this rank's memory; it lies
  // `slot_offset` bytes into its slot.
  virtual void send_box(const std::vector<int>& /*to*/, std::size_t /*index*/, std::size_t /*slot_offset*/,
                        const std::uint8_t* /*data*/, std::size_t /*bytes*/) {}
  // Something else changed that a sleeping peer may wait for.
  virtual void wake() {}
  Link* link_to(int peer) const { return links.empty() ? nullptr : links[static_cast<std::size_t>(peer)]; }
  // Bytes of a peer's region, mapped on first use.
  virtual std::uint8_t* resolve(int peer, std::int64_t region, std::uint64_t id, std::uint64_t offset,
                                std::size_t bytes) = 0;
  // Copies from a peer's own memory, which is nobody's but his; Error where he or it is gone.
  virtual void pull(int peer, std::uint64_t address, std::uint8_t* out, std::size_t bytes) = 0;
  // Whether the peer is there still, so that what was pulled came from him.
  virtual void confirm(int peer) { static_cast<void>(peer); }
};

// Says to the peers what this rank is about to do. Returns the operation's fingerprint.
std::uint64_t announce(AreaHead& own, const Call& call, std::uint64_t number);

enum class Progress { moved, blocked, done };

// A payload that arrived with other bytes than it was sent with.
struct Damage {
  int sender = -1;
  int chunk = 0;
  std::size_t piece = 0;
  std::uint32_t sent = 0;  // checksums
  std::uint32_t arrived = 0;
};

class Machine {
 public:
  // `operation` identifies the operation among the ranks (plan and call number), `number` is its call number + 1.
  Machine(Fabric& fabric, Call call, std::uint64_t operation, std::uint64_t number);

  // Runs at most `budget` instructions. Ahead of the operation before it a machine does everything but say that it is
  // done with pieces, since peers count them in order.
  Progress advance(int budget = 1 << 30, bool ahead = false);
  // All pieces are on their way: what follows may begin, as far as the slots go.
  bool launched() const { return !direct_ && met_ && !probe_ && started_ == plan_.pieces(); }
  // May advance ahead.
  bool independent() const { return met_ && !direct_ && !probe_; }

  const Call& call() const { return call_; }
  std::uint64_t operation() const { return operation_; }
  std::uint64_t number() const { return number_; }
  std::uint64_t wire_bytes() const { return wire_bytes_; }
  // Valid while blocked: the rank the oldest piece waits for.
  int blocker() const { return blocker_; }
  // A flag or header of another operation was read; blocker() says whose.
  bool mismatch() const { return mismatch_; }
  // A payload did not have its checksum; the operation cannot go on. Null where there is none.
  const Damage* damage() const { return damage_.sender < 0 ? nullptr : &damage_; }
  // All zero unless they were wanted when the operation started.
  const Times& times() const { return times_; }

 private:
  struct Piece {
    std::size_t pc = 0;
  };
  enum class Step { moved, blocked };

  Progress run(int budget, bool ahead);
  bool meet();
  bool probe();
  bool run_piece(std::size_t piece, int& budget);
  bool can_start(std::size_t piece);
  Step execute(std::size_t piece, const Instruction& instruction);
  void compute(std::size_t piece, const Instruction& instruction);
  bool ready(std::size_t piece, const Instruction& instruction);
  bool intact(std::size_t piece, const Instruction& instruction);
  void publish(std::size_t piece, const Instruction& instruction);
  void encode(std::size_t piece, const Instruction& instruction);
  void reduce(std::size_t piece, const Instruction& instruction);
  void reduce_direct(std::size_t piece, const Instruction& instruction);
  Progress advance_direct(int budget);
  void run_direct(std::size_t piece);
  void adopt(std::size_t piece, const Instruction& instruction);
  void forward(std::size_t piece, const Instruction& instruction);
  void copy(std::size_t piece, const Instruction& instruction);
  void take(int owner, const Slice& slice, const Instruction& instruction, std::uint8_t* out);
  bool read_by_peers(int peer) const;
  void put(const Instruction& instruction, const std::uint8_t* in, std::size_t numel, DType dtype, std::uint8_t* out);
  std::uint8_t* box(std::size_t piece, int rank, int index) const;
  void arrived(const Slice& slice) {
    if (call_.arrival.take && !direct_) call_.arrival.take(*call_.kernels, slice.out_offset, slice.numel);
  }
  std::uint8_t* accumulator(std::size_t piece, int chunk);
  Combine combine_for(const Instruction& instruction, const Slice& slice) const;
  void add_up(const Instruction& instruction, const Slice& slice, Combine& call);

  Fabric& fabric_;
  Call call_;
  const Plan& plan_;
  const Program& program_;
  std::uint64_t operation_;
  std::uint64_t number_;
  std::uint64_t base_;      // sequence number of piece 0
  std::size_t oldest_ = 0;  // pieces before it are finished
  std::size_t started_ = 0;
  Piece window_[kSlots];
  std::vector<std::vector<std::uint8_t>> accumulators_;  // per slot, all chunks
  std::vector<const std::uint8_t*> payloads_;
  std::vector<std::uint8_t> terms_;          // of sums over several codecs, decoded
  std::vector<std::uint8_t*> peer_tensors_;  // direct: every rank's tensor
  std::vector<std::uint64_t> pulled_;        // direct: its address in its owner, 0 where it is mapped here
  std::unique_ptr<Probe> probe_;
  bool begun_ = false;
  bool met_ = false;
  bool direct_ = false;
  bool mismatch_ = false;
  Damage damage_;
  int blocker_ = -1;
  std::uint64_t wire_bytes_ = 0;
  const bool timed_ = Times::wanted().load(std::memory_order_relaxed);
  Times times_;
};

}  // namespace dtcomm
