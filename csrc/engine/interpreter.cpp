#include "engine/interpreter.h"

#include <algorithm>

#include "engine/crc32c.h"
#include "engine/process_page.h"

namespace dtcomm {
namespace {

// Pieces under way: one staged ahead, one summed, one written out. More of them and the slots in use outgrow the
// second-level cache: 8 took 15 % longer at 1 and 64 MB.
constexpr std::size_t kWindow = 3;
constexpr std::size_t kLinkWindow = 4;  // over a link, which has to be kept busy
static_assert(2 * kLinkWindow <= kSlots, "the operation behind begins when this one has all its pieces under way");
// Cores move while a program runs. The first operation probes, then of up to 16 KiB every 1024th, of 2 MiB and more
// every 8th: small ones too take longer where cores are far and staging does not know it.
constexpr std::size_t kProbeBytes = 16 * 1024;  // of input
constexpr std::uint64_t kProbeEvery = 1024;     // times kProbeBytes
constexpr std::uint64_t kProbeMost = 128;       // of these in one operation
constexpr double kFarNs = 250;                  // above it the cores share no cache, so staging past it pays

Phase phase_of(Op op) { return op == Op::encode ? Phase::encode : op == Op::reduce ? Phase::reduce : Phase::decode; }

}  // namespace

Machine::Machine(Fabric& fabric, Call call, std::uint64_t operation, std::uint64_t number)
    : fabric_(fabric),
      call_(std::move(call)),
      plan_(*call_.plan),
      program_(plan_.program()),
      operation_(operation),
      number_(number),
      base_(fabric.next_piece),
      accumulators_(program_.accumulates ? kSlots : 0) {
  fabric.next_piece += plan_.pieces();
  payloads_.reserve(static_cast<std::size_t>(fabric.ranks));
  // A rank that gives something that peers cannot reach knows at once that the payloads go through the slots;
  // otherwise all that give have to say so first.
  met_ = !plan_.direct() || (program_.publishes(fabric.rank) && call_.region < 0 && call_.address == 0);
  // Ranks run the same operations, so they probe in the same ones.
  if (fabric.probes && plan_.input_bytes() > 0) {
    if (fabric.until_probe == 0) {
      fabric.until_probe = kProbeEvery;
      probe_ = std::make_unique<Probe>(fabric.rank, fabric.peers, number);
    }
    const std::uint64_t counts = std::max<std::uint64_t>(plan_.input_bytes() / kProbeBytes, 1);
    fabric.until_probe -= std::min({fabric.until_probe, kProbeMost, counts});
  }
}

bool Machine::probe() {
  for (;;) {
    const Probe::State state = probe_->advance();
    if (state == Probe::State::over) break;
    blocker_ = probe_->partner();
    if (state == Probe::State::waiting) return false;
    fabric_.wake();
  }
  if (const double round_trip = probe_->round_trip_ns(); round_trip > 0) {
    fabric_.round_trip_ns = round_trip;
    fabric_.stream_staging = round_trip > kFarNs;
  }
  probe_.reset();
  return true;
}

Progress Machine::advance(int budget, bool ahead) {
  if (!begun_) {
    for (const Task& task : call_.before) task(*call_.kernels);
    begun_ = true;
  }
  const Progress progress = run(budget, ahead);
  if (progress == Progress::done) {
    // Until now peers may have written into the tensor.
    if (call_.arrival.take && direct_) call_.arrival.take(*call_.kernels, 0, plan_.segments()[0].numel);
    for (const Task& task : call_.after) task(*call_.kernels);
  }
  return progress;
}

Progress Machine::run(int budget, bool ahead) {
  const std::size_t pieces = plan_.pieces();
  if (probe_ && !probe()) return Progress::blocked;
  if (!met_ && pieces > 0 && !meet()) return Progress::blocked;
  if (direct_) return advance_direct(budget);
  const std::size_t window = fabric_.wired ? kLinkWindow : kWindow;
  bool moved = false;
  for (;;) {
    bool any = false;
    if (budget > 0 && started_ < pieces && started_ - oldest_ < window && can_start(started_)) {
      window_[started_ % kSlots] = Piece{};
      ++started_;
      any = true;
      run_piece(started_ - 1, budget);  // first: a peer can go on with what is staged here
    }
    for (std::size_t piece = oldest_; piece < started_ && budget > 0; ++piece) any |= run_piece(piece, budget);
    while (!ahead && oldest_ < started_ && window_[oldest_ % kSlots].pc == program_.instructions.size()) {
      ++oldest_;
      any = true;
      fabric_.publish_done(base_ + oldest_);
    }
    if (oldest_ == pieces && !ahead) break;
    if (!any || budget <= 0) return moved || any ? Progress::moved : Progress::blocked;
    moved = true;
  }
  return Progress::done;
}

// A slot is free when every peer is done with the piece that used it last.
bool Machine::can_start(std::size_t piece) {
  const std::uint64_t seq = base_ + piece;
  if (seq < kSlots) return true;
  const std::uint64_t need = seq - kSlots + 1;
  if (fabric_.seen_done >= need) return true;
  std::uint64_t least = ~0ull;
  for (int peer = 0; peer < fabric_.ranks; ++peer) {
    if (peer == fabric_.rank) continue;
    const std::uint64_t done = fabric_.peers[static_cast<std::size_t>(peer)].done->load(std::memory_order_acquire);
    if (done < need && started_ == oldest_) blocker_ = peer;
    least = std::min(least, done);
  }
  fabric_.seen_done = least;
  return least >= need;
}

bool Machine::run_piece(std::size_t piece, int& budget) {
  std::size_t& pc = window_[piece % kSlots].pc;
  bool moved = false;
  while (pc < program_.instructions.size() && budget > 0) {
    if (execute(piece, program_.instructions[pc]) == Step::blocked) break;
    ++pc;
    --budget;
    moved = true;
  }
  return moved;
}

Machine::Step Machine::execute(std::size_t piece, const Instruction& instruction) {
  // Both ends of an empty chunk skip it.
  if (plan_.begin(piece, instruction.chunk) == plan_.end(piece, instruction.chunk)) return Step::moved;
  switch (instruction.op) {
    case Op::receive:
      if (ready(piece, instruction)) {
        return !plan_.checksum() || intact(piece, instruction) ? Step::moved : Step::blocked;
      }
      if (piece == oldest_ || mismatch_) blocker_ = instruction.peer;
      return Step::blocked;
    case Op::send:
      publish(piece, instruction);
      break;
    default:
      if (!timed_) {
        compute(piece, instruction);
        break;
      }
      const std::uint64_t begin = now_ns();
      compute(piece, instruction);
      times_.add(phase_of(instruction.op), begin, now_ns());
  }
  return Step::moved;
}

bool Machine::ready(std::size_t piece, const Instruction& instruction) {
  const PeerView& view = fabric_.peers[static_cast<std::size_t>(instruction.peer)];
  const std::uint64_t seq = base_ + piece;
  const std::size_t index = static_cast<std::size_t>(instruction.box) * kSlots + seq % kSlots;
  const Flag& flag = view.flags[index];
  const std::uint64_t seen = flag.seq.load(std::memory_order_acquire);
  if (seen < seq + 1) return false;
  if (seen > seq + 1 || flag.operation.load(std::memory_order_relaxed) != operation_) {
    mismatch_ = true;
    return false;
  }
  Link* const link = fabric_.link_to(instruction.peer);
  return !link ||
         link->arrived(
             instruction.peer, index, seq + 1,
             view.stamps[index * static_cast<std::size_t>(fabric_.ranks) + static_cast<std::size_t>(fabric_.rank)],
             plan_.payload_bytes(piece, instruction.chunk, instruction.level));
}

// The receiver's own computation over the bytes as it sees them, before anything is made of them.
bool Machine::intact(std::size_t piece, const Instruction& instruction) {
  const PeerView& view = fabric_.peers[static_cast<std::size_t>(instruction.peer)];
  const Flag& flag = view.flags[static_cast<std::size_t>(instruction.box) * kSlots + (base_ + piece) % kSlots];
  const std::uint32_t sent = flag.checksum.load(std::memory_order_relaxed);
  const std::uint32_t arrived = crc32c(box(piece, instruction.peer, instruction.box),
                                       plan_.payload_bytes(piece, instruction.chunk, instruction.level));
  if (sent == arrived) return true;
  damage_ = {instruction.peer, instruction.chunk, piece, sent, arrived};
  blocker_ = instruction.peer;
  return false;
}

void Machine::publish(std::size_t piece, const Instruction& instruction) {
  const std::uint64_t seq = base_ + piece;
  const std::size_t index = static_cast<std::size_t>(instruction.box) * kSlots + seq % kSlots;
  const std::size_t bytes = plan_.payload_bytes(piece, instruction.chunk, instruction.level);
  std::uint32_t checksum = 0;
  if (plan_.checksum()) {
    // What is sent in several steps has the checksum of the first: the bytes may have changed since.
    const Flag& own = fabric_.peers[static_cast<std::size_t>(fabric_.rank)].flags[index];
    const bool again = own.seq.load(std::memory_order_relaxed) == seq + 1;
    checksum =
        again ? own.checksum.load(std::memory_order_relaxed) : crc32c(box(piece, fabric_.rank, instruction.box), bytes);
  }
  Stamp* stamps = fabric_.peers[static_cast<std::size_t>(fabric_.rank)].stamps;
  for (const int peer : instruction.peers) {
    if (Link* const link = fabric_.link_to(peer)) {
      link->send(stamps[index * static_cast<std::size_t>(fabric_.ranks) + static_cast<std::size_t>(peer)], seq + 1,
                 bytes);
    }
  }
  fabric_.publish_flag(index, seq + 1, operation_, checksum);
  fabric_.send_box(instruction.peers, index, static_cast<std::size_t>(instruction.box) * plan_.box_stride(),
                   box(piece, fabric_.rank, instruction.box), bytes);
  for (const int peer : instruction.peers) {
    if (Link* const link = fabric_.link_to(peer)) link->sent(peer, bytes);
  }
  wire_bytes_ += (bytes + (plan_.checksum() ? kChecksumBytes : 0)) * instruction.peers.size();
}

std::uint8_t* Machine::box(std::size_t piece, int rank, int index) const {
  const PeerView& view = fabric_.peers[static_cast<std::size_t>(rank)];
  return view.slot(base_ + piece) + static_cast<std::size_t>(index) * plan_.box_stride();
}

}  // namespace dtcomm
