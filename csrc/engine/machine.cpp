#include "engine/machine.h"

#include <algorithm>
#include <cstring>

#include "codec/random.h"
#include "engine/crc32c.h"
#include "engine/mix.h"
#include "engine/process.h"

namespace dtcomm {
namespace {

// Pieces under way: one staged ahead, one summed, one written out. More of them and the slots in use outgrow the
// second-level cache: 8 took 15 % longer at 1 and 64 MB.
constexpr std::size_t kWindow = 3;
constexpr std::size_t kLinkWindow = 4;  // over a link, which has to be kept busy
static_assert(2 * kLinkWindow <= kSlots, "the operation behind begins when this one has all its pieces under way");
// Cores move while a program runs. Of 64 KiB every 256th operation probes, of 2 MiB and more every 8th; the time of
// smaller ones does not depend on where the cores are.
constexpr std::size_t kProbeBytes = 64 * 1024;  // of input
constexpr std::uint64_t kProbeEvery = 256;      // times kProbeBytes
constexpr std::uint64_t kProbeMost = 32;        // of these in one operation
constexpr double kFarNs = 250;                  // above it the cores share no cache, so staging past it pays

Phase phase_of(Op op) { return op == Op::encode ? Phase::encode : op == Op::reduce ? Phase::reduce : Phase::decode; }

}  // namespace

std::uint64_t announce(AreaHead& own, const Call& call, std::uint64_t number) {
  std::uint64_t fingerprint = call.plan->fingerprint();
  if (call.agreed) fingerprint = mix64(fingerprint, call.agreed);
  const std::uint64_t operation = mix64(fingerprint, number) | 1;  // never the zero of an unused flag
  OpHeader& header = own.ops[number % kOpRing];
  header.number.store(0, std::memory_order_release);
  header.fingerprint.store(operation, std::memory_order_relaxed);
  header.region.store(call.region, std::memory_order_relaxed);
  header.region_id.store(call.region_id, std::memory_order_relaxed);
  header.region_offset.store(call.region_offset, std::memory_order_relaxed);
  std::string text = call.plan->text();
  if (call.agreed) text += " with number " + std::to_string(call.agreed);
  header.text[text.copy(header.text, kOpText - 1)] = 0;
  header.number.store(number, std::memory_order_release);
  return operation;
}

namespace {

struct Range {
  const std::uint8_t* begin;
  const std::uint8_t* end;
};

// What a call reads and writes, in order.
std::vector<Range> ranges_of(const Call& call) {
  const auto ranks = static_cast<std::size_t>(call.plan->program().ranks);
  const Geometry geometry = call.plan->geometry();
  const bool shards_in = geometry == Geometry::scatter || geometry == Geometry::exchange;
  const bool shards_out = geometry == Geometry::gather || geometry == Geometry::exchange;
  std::vector<Range> ranges;
  const auto add = [&](const void* data, std::size_t bytes) {
    const auto* begin = static_cast<const std::uint8_t*>(data);
    if (begin && bytes > 0) ranges.push_back({begin, begin + bytes});
  };
  for (std::size_t i = 0; i < call.segments.size(); ++i) {
    const Segment& segment = call.plan->segments()[i];
    const std::size_t numel_in = segment.numel * (shards_in ? ranks : 1);
    add(call.segments[i].in, numel_in * size_of(segment.dtype));
    add(call.segments[i].out, segment.numel * (shards_out ? ranks : 1) * size_of(segment.dtype));
    add(call.segments[i].residual, numel_in * sizeof(float));
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  return ranges;
}

}  // namespace

bool disjoint(const Call& one, const Call& other) {
  if (!one.after.empty() || !other.before.empty()) return false;  // steps touch what they like
  const std::vector<Range> a = ranges_of(one);
  const std::vector<Range> b = ranges_of(other);
  // The end of everything in `a` that begins before the range of `b` at hand, and the other way round.
  const auto apart = [](const std::vector<Range>& lower, const std::vector<Range>& upper) {
    const std::uint8_t* end = nullptr;
    std::size_t at = 0;
    for (const Range& range : upper) {
      for (; at < lower.size() && lower[at].begin <= range.begin; ++at) end = std::max(end, lower[at].end);
      if (end > range.begin) return false;
    }
    return true;
  };
  return apart(a, b) && apart(b, a);
}

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
  // A rank that gives something, but not out of shared memory, knows at once that the payloads go through the slots;
  // otherwise all that give have to say so first.
  met_ = !plan_.direct() || (program_.gives(fabric.rank) && call_.region < 0);
  // Ranks run the same operations, so they probe in the same ones.
  if (fabric.probes && plan_.input_bytes() >= kProbeBytes) {
    if (fabric.until_probe == 0) {
      fabric.until_probe = kProbeEvery;
      probe_ = std::make_unique<Probe>(fabric.rank, fabric.peers, number);
    }
    fabric.until_probe -=
        std::min({fabric.until_probe, kProbeMost, static_cast<std::uint64_t>(plan_.input_bytes() / kProbeBytes)});
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

void Machine::compute(std::size_t piece, const Instruction& instruction) {
  switch (instruction.op) {
    case Op::encode:
      return encode(piece, instruction);
    case Op::reduce:
      return reduce(piece, instruction);
    case Op::adopt:
      return adopt(piece, instruction);
    case Op::forward:
      return forward(piece, instruction);
    case Op::copy:
      return copy(piece, instruction);
    case Op::receive:
    case Op::send:
      return;
  }
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
  wire_bytes_ += (bytes + (plan_.checksum() ? kChecksumBytes : 0)) * instruction.peers.size();
}

std::uint8_t* Machine::box(std::size_t piece, int rank, int index) const {
  const PeerView& view = fabric_.peers[static_cast<std::size_t>(rank)];
  return view.slot(base_ + piece) + static_cast<std::size_t>(index) * plan_.box_stride();
}

std::uint8_t* Machine::accumulator(std::size_t piece, int chunk) {
  std::vector<std::uint8_t>& memory = accumulators_[piece % kSlots];
  if (memory.empty()) memory.resize(plan_.accumulator_bytes() * static_cast<std::size_t>(program_.chunks));
  return memory.data() + plan_.accumulator_bytes() * static_cast<std::size_t>(chunk);
}

// What every encoding and sum of a slice has in common.
Combine Machine::combine_for(const Instruction& instruction, const Slice& slice) const {
  const DType dtype = plan_.segments()[slice.segment].dtype;
  const Pointers& pointers = call_.segments[slice.segment];
  Combine call;
  call.numel = slice.numel;
  call.op = plan_.op();
  call.dtype = call.local_dtype = call.out_dtype = dtype;
  call.offset = slice.in_offset;
  if (instruction.divide) call.divisor = plan_.divisor();
  if (instruction.box >= 0) {
    call.key =
        mix_key(call_.seed, static_cast<std::uint32_t>(fabric_.rank), static_cast<std::uint32_t>(instruction.box));
    call.stream_payload = fabric_.stream_staging;
  }
  if (pointers.residual) {
    if (instruction.takes_residual) call.residual_in = pointers.residual + slice.in_offset;
    if (instruction.leaves_residual) call.residual_out = pointers.residual + slice.in_offset;
  }
  if (instruction.output && pointers.out) {
    call.out = pointers.out + slice.out_offset * size_of(dtype);
    call.stream_out = plan_.streams(instruction.chunk);
  }
  return call;
}

void Machine::encode(std::size_t piece, const Instruction& instruction) {
  for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
       ++slice) {
    const Segment& segment = plan_.segments()[slice->segment];
    const std::uint8_t* in = call_.segments[slice->segment].in + slice->in_offset * size_of(segment.dtype);
    Combine call = combine_for(instruction, *slice);
    call.local = in;
    call.payload_out = box(piece, fabric_.rank, instruction.box) + slice->at(instruction.level).offset;
    call_.kernels->combine(segment.at(instruction.level), call);
  }
}

void Machine::reduce(std::size_t piece, const Instruction& instruction) {
  std::size_t kept = 0;
  for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
       ++slice) {
    const Segment& segment = plan_.segments()[slice->segment];
    const Pointers& pointers = call_.segments[slice->segment];
    Combine call = combine_for(instruction, *slice);
    payloads_.clear();
    for (const BoxRef& input : instruction.inputs) {
      payloads_.push_back(box(piece, input.rank, input.box) + slice->at(input.level).offset);
    }
    const Codec& codec = segment.at(instruction.box >= 0         ? instruction.level
                                    : instruction.inputs.empty() ? 0
                                                                 : instruction.inputs[0].level);
    call.payloads = payloads_.data();
    call.count = static_cast<int>(payloads_.size());
    call.position = instruction.position;
    const DType wide = accumulator_dtype(segment.dtype);
    if (instruction.local == Local::input) {
      call.local = pointers.in + slice->in_offset * size_of(segment.dtype);
    } else if (instruction.local == Local::accumulator) {
      call.local = accumulator(piece, instruction.chunk) + kept;
      call.local_dtype = wide;
    }
    if (instruction.keep) {
      call.out = accumulator(piece, instruction.chunk) + kept;
      call.out_dtype = wide;
    }
    kept += AreaLayout::round_up(slice->numel * size_of(wide), kLine);
    const bool mixed = std::any_of(instruction.inputs.begin(), instruction.inputs.end(), [&](const BoxRef& input) {
      return std::memcmp(&segment.at(input.level), &codec, sizeof codec) != 0;
    });
    if (mixed) add_up(instruction, *slice, call);
    if (instruction.box >= 0) {
      call.payload_out = box(piece, fabric_.rank, instruction.box) + slice->at(instruction.level).offset;
      call.stream_out = call.stream_payload;  // one kind of store a pass
    }
    call_.kernels->combine(codec, call);
  }
}

// Terms of another codec than the sum's: their fp32 sum, in rank order, is all that its encoding sees of them.
void Machine::add_up(const Instruction& instruction, const Slice& slice, Combine& call) {
  const Segment& segment = plan_.segments()[slice.segment];
  const DType wide = accumulator_dtype(segment.dtype);
  const std::size_t stride = AreaLayout::round_up(slice.numel * size_of(wide), kLine);
  const std::size_t count = payloads_.size();
  terms_.resize((count + 2) * stride + kLine);
  std::uint8_t* const terms = terms_.data() + (kLine - reinterpret_cast<std::uintptr_t>(terms_.data()) % kLine);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint8_t* const term = terms + i * stride;
    call_.kernels->decode(segment.at(instruction.inputs[i].level), payloads_[i], slice.numel, segment.dtype, term, wide,
                          false);
    payloads_[i] = term;
  }
  Combine sum = call;
  if (call.local && call.local_dtype != wide) {
    std::uint8_t* const local = terms + (count + 1) * stride;
    call_.kernels->decode(Codec{}, static_cast<const std::uint8_t*>(call.local), slice.numel, call.local_dtype, local,
                          wide, false);
    sum.local = local;
    sum.local_dtype = wide;
  }
  sum.payloads = payloads_.data();
  sum.divisor = 1;
  sum.dtype = sum.out_dtype = wide;
  sum.out = terms + count * stride;
  sum.stream_out = false;
  const bool settles = instruction.leaves_residual && instruction.box >= 0;  // its encoding's error
  if (settles) sum.residual_in = sum.residual_out = nullptr;
  call_.kernels->combine(Codec{}, sum);
  call.payloads = nullptr;
  call.count = 0;
  call.position = 0;
  call.local = sum.out;
  call.local_dtype = wide;
  if (!settles) call.residual_in = call.residual_out = nullptr;
}

void Machine::adopt(std::size_t piece, const Instruction& instruction) {
  for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
       ++slice) {
    const Segment& segment = plan_.segments()[slice->segment];
    std::uint8_t* out = call_.segments[slice->segment].out;
    if (!out) continue;
    out += slice->out_offset * size_of(segment.dtype);
    const std::uint8_t* payload = box(piece, instruction.peer, instruction.box) + slice->at(instruction.level).offset;
    call_.kernels->decode(segment.at(instruction.level), payload, slice->numel, segment.dtype, out, segment.dtype,
                          plan_.streams(instruction.chunk));
  }
}

void Machine::forward(std::size_t piece, const Instruction& instruction) {
  std::memcpy(box(piece, fabric_.rank, instruction.box), box(piece, instruction.peer, instruction.source),
              plan_.payload_bytes(piece, instruction.chunk, instruction.level));
}

// Elements as they are, into the output.
void Machine::put(const Instruction& instruction, const std::uint8_t* in, std::size_t numel, DType dtype,
                  std::uint8_t* out) {
  if (out != in) call_.kernels->decode(Codec{}, in, numel, dtype, out, dtype, plan_.streams(instruction.chunk));
}

void Machine::copy(std::size_t piece, const Instruction& instruction) {
  for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
       ++slice) {
    const Pointers& pointers = call_.segments[slice->segment];
    const DType dtype = plan_.segments()[slice->segment].dtype;
    const std::uint8_t* in = pointers.in + slice->in_offset * size_of(dtype);
    if (pointers.out) put(instruction, in, slice->numel, dtype, pointers.out + slice->out_offset * size_of(dtype));
  }
}

}  // namespace dtcomm
