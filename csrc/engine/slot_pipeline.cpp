#include "engine/slot_pipeline.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "engine/crc32c.h"
#include "engine/parallel_kernels.h"

namespace dtcomm {
namespace {

// Pieces in flight: one that is staged ahead, one that is summed, one that is written out. With more, the slots in use
// outgrow the second-level cache: 8 took 15 % longer at 1 and 64 MB.
constexpr std::size_t kWindow = 3;
constexpr std::size_t kLatencyWindow = 4;  // over TCP or an emulated link, which has to be kept busy
constexpr std::size_t kWideAreaWindow = kSlots;
static_assert(2 * kLatencyWindow <= kSlots, "the next operation begins when this one has all its pieces in flight");

Phase phase_of(Op op) { return op == Op::encode ? Phase::encode : op == Op::reduce ? Phase::reduce : Phase::decode; }

}  // namespace

SlotPipeline::SlotPipeline(OperationState& state)
    : ExecutionMode(state), accumulators_(program_.accumulates ? kSlots : 0) {}

Progress SlotPipeline::advance(int budget, bool ahead) {
  const std::size_t pieces = plan_.pieces();
  const std::size_t window = transport_.wide_area ? kWideAreaWindow : transport_.has_latency ? kLatencyWindow : kWindow;
  bool moved = false;
  for (;;) {
    bool any = false;
    if (budget > 0 && started_ < pieces && started_ - oldest_ < window && can_start(started_)) {
      next_instruction_[started_ % kSlots] = 0;
      ++started_;
      any = true;
      run_piece(started_ - 1, budget);  // before the others, because peers can go on with what is staged here
    }
    for (std::size_t piece = oldest_; piece < started_ && budget > 0; ++piece) any |= run_piece(piece, budget);
    while (!ahead && oldest_ < started_ && next_instruction_[oldest_ % kSlots] == program_.instructions.size()) {
      ++oldest_;
      any = true;
      transport_.publish_pieces_done(state_.first_seq + oldest_);
    }
    if (oldest_ == pieces && !ahead) return Progress::done;
    if (!any || budget <= 0) return moved || any ? Progress::moved : Progress::blocked;
    moved = true;
  }
}

// A slot is free when every peer is done with the piece that used it last, and the transport with its payloads.
bool SlotPipeline::can_start(std::size_t piece) {
  const std::uint64_t seq = state_.first_seq + piece;
  if (seq < kSlots) return true;
  if (!is_done_by_all(seq - kSlots + 1)) return false;
  const int peer = transport_.peer_being_sent(seq);
  if (peer >= 0 && started_ == oldest_) state_.waiting_for = peer;
  return peer < 0;
}

bool SlotPipeline::is_done_by_all(std::uint64_t need) {
  if (transport_.pieces_done_by_all >= need) return true;
  std::uint64_t least = ~0ull;
  for (int peer = 0; peer < transport_.ranks; ++peer) {
    // Pieces in all slots may belong to the operation before, which this rank has not finished either.
    if (peer == transport_.rank && !transport_.wide_area) continue;
    const std::uint64_t done = transport_.peer(peer).pieces_done->load(std::memory_order_acquire);
    if (done < need && started_ == oldest_ && peer != transport_.rank) state_.waiting_for = peer;
    least = std::min(least, done);
  }
  transport_.pieces_done_by_all = least;
  return least >= need;
}

bool SlotPipeline::run_piece(std::size_t piece, int& budget) {
  std::size_t& next = next_instruction_[piece % kSlots];
  bool moved = false;
  while (next < program_.instructions.size() && budget > 0) {
    if (!execute(piece, program_.instructions[next])) break;
    ++next;
    --budget;
    moved = true;
  }
  return moved;
}

bool SlotPipeline::execute(std::size_t piece, const Instruction& instruction) {
  // Both ends of an empty chunk skip it.
  if (plan_.begin(piece, instruction.chunk) == plan_.end(piece, instruction.chunk)) return true;
  switch (instruction.op) {
    case Op::receive:
      if (received(piece, instruction)) return !plan_.checksum() || checksum_matches(piece, instruction);
      if (piece == oldest_ || state_.mismatch) state_.waiting_for = instruction.peer;
      return false;
    case Op::send:
      publish(piece, instruction);
      return true;
    default:
      if (!state_.timed) {
        compute(piece, instruction);
        return true;
      }
      const std::uint64_t begin = now_ns();
      compute(piece, instruction);
      state_.times.add(phase_of(instruction.op), begin, now_ns());
      return true;
  }
}

bool SlotPipeline::received(std::size_t piece, const Instruction& instruction) {
  const PeerView& view = transport_.peer(instruction.peer);
  const std::uint64_t seq = state_.first_seq + piece;
  const std::size_t index = static_cast<std::size_t>(instruction.box) * kSlots + seq % kSlots;
  const BoxFlag& flag = view.flags[index];
  const std::uint64_t seen = flag.seq.load(std::memory_order_acquire);
  if (seen < seq + 1) return false;
  if (seen > seq + 1 || flag.operation.load(std::memory_order_relaxed) != state_.fingerprint) {
    state_.mismatch = true;
    return false;
  }
  if (view.arrived && !fills_box(view.arrived[index], piece, instruction)) return false;
  EmulatedLink* const link = transport_.link_to(instruction.peer);
  if (!link) return true;
  const std::size_t stamp =
      index * static_cast<std::size_t>(transport_.ranks) + static_cast<std::size_t>(transport_.rank);
  return link->delivered(instruction.peer, index, seq + 1, view.stamps[stamp],
                         plan_.payload_bytes(piece, instruction.chunk, instruction.level));
}

// A shorter payload, or one elsewhere in the slot, would leave bytes of an earlier one in the box.
bool SlotPipeline::fills_box(const ArrivedBytes& arrived, std::size_t piece, const Instruction& instruction) {
  const std::size_t bytes = plan_.payload_bytes(piece, instruction.chunk, instruction.level);
  const std::size_t slot_offset = static_cast<std::size_t>(instruction.box) * plan_.box_stride();
  if (arrived.bytes == bytes && arrived.slot_offset == slot_offset) return true;
  state_.corrupt = {instruction.peer, instruction.chunk, piece,
                    std::to_string(arrived.bytes) + " bytes at offset " + std::to_string(arrived.slot_offset) +
                        " instead of " + std::to_string(bytes) + " at " + std::to_string(slot_offset)};
  state_.waiting_for = instruction.peer;
  return false;
}

// The receiver computes the checksum over the bytes as it sees them, before it uses them.
bool SlotPipeline::checksum_matches(std::size_t piece, const Instruction& instruction) {
  const std::uint64_t seq = state_.first_seq + piece;
  const BoxFlag& flag =
      transport_.peer(instruction.peer).flags[static_cast<std::size_t>(instruction.box) * kSlots + seq % kSlots];
  const std::uint32_t sent = flag.checksum.load(std::memory_order_relaxed);
  const std::uint32_t received = crc32c(box(piece, instruction.peer, instruction.box),
                                        plan_.payload_bytes(piece, instruction.chunk, instruction.level));
  if (sent == received) return true;
  char difference[64];
  std::snprintf(difference, sizeof difference, "checksum %08x when sent, %08x on arrival", sent, received);
  state_.corrupt = {instruction.peer, instruction.chunk, piece, difference};
  state_.waiting_for = instruction.peer;
  return false;
}

void SlotPipeline::publish(std::size_t piece, const Instruction& instruction) {
  const std::uint64_t seq = state_.first_seq + piece;
  const std::size_t index = static_cast<std::size_t>(instruction.box) * kSlots + seq % kSlots;
  const std::size_t bytes = plan_.payload_bytes(piece, instruction.chunk, instruction.level);
  const PeerView& own = transport_.own();
  std::uint8_t* const payload = box(piece, transport_.rank, instruction.box);
  std::uint32_t checksum = 0;
  if (plan_.checksum()) {
    // A box that is sent in several steps keeps the checksum of the first: the bytes may have been damaged since.
    const BoxFlag& flag = own.flags[index];
    const bool sent_before = flag.seq.load(std::memory_order_relaxed) == seq + 1;
    checksum = sent_before ? flag.checksum.load(std::memory_order_relaxed) : crc32c(payload, bytes);
  }
  for (const int peer : instruction.peers) {
    if (EmulatedLink* const link = transport_.link_to(peer)) {
      const std::size_t stamp = index * static_cast<std::size_t>(transport_.ranks) + static_cast<std::size_t>(peer);
      link->send(own.stamps[stamp], seq + 1, bytes);
    }
  }
  transport_.publish_flag(index, seq + 1, state_.fingerprint, checksum);
  transport_.send_box(instruction.peers, index, static_cast<std::size_t>(instruction.box) * plan_.box_stride(), payload,
                      bytes);
  for (const int peer : instruction.peers) {
    if (EmulatedLink* const link = transport_.link_to(peer)) link->spend_cpu_time(peer, bytes);
  }
  state_.wire_bytes += (bytes + (plan_.checksum() ? kChecksumBytes : 0)) * instruction.peers.size();
}

std::uint8_t* SlotPipeline::box(std::size_t piece, int rank, int index) const {
  return transport_.peer(rank).slot(state_.first_seq + piece) + static_cast<std::size_t>(index) * plan_.box_stride();
}

std::uint8_t* SlotPipeline::accumulator(std::size_t piece, int chunk) {
  std::vector<std::uint8_t>& memory = accumulators_[piece % kSlots];
  if (memory.empty()) memory.resize(plan_.accumulator_bytes() * static_cast<std::size_t>(program_.chunks));
  return memory.data() + plan_.accumulator_bytes() * static_cast<std::size_t>(chunk);
}

void SlotPipeline::compute(std::size_t piece, const Instruction& instruction) {
  switch (instruction.op) {
    case Op::encode:
      return encode(piece, instruction);
    case Op::reduce:
      return reduce(piece, instruction);
    case Op::decode:
      return decode(piece, instruction);
    case Op::forward:
      return forward(piece, instruction);
    case Op::copy:
      return copy(piece, instruction);
    case Op::receive:
    case Op::send:
      return;
  }
}

void SlotPipeline::encode(std::size_t piece, const Instruction& instruction) {
  for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
       ++slice) {
    const Segment& segment = plan_.segments()[slice->segment];
    Combine combine = combine_arguments(instruction, *slice);
    combine.local = call_.tensors[slice->segment].in + slice->in_offset * size_of(segment.dtype);
    combine.payload_out = box(piece, transport_.rank, instruction.box) + slice->at(instruction.level).offset;
    parallel_combine(threads_, *call_.kernels, segment.at(instruction.level), combine);
    if (instruction.output) apply_epilogue(*slice);
  }
}

void SlotPipeline::reduce(std::size_t piece, const Instruction& instruction) {
  std::size_t accumulator_offset = 0;
  for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
       ++slice) {
    const Segment& segment = plan_.segments()[slice->segment];
    Combine combine = combine_arguments(instruction, *slice);
    payloads_.clear();
    for (const BoxRef& input : instruction.inputs) {
      payloads_.push_back(box(piece, input.rank, input.box) + slice->at(input.level).offset);
    }
    const Codec& codec = segment.at(instruction.box >= 0         ? instruction.level
                                    : instruction.inputs.empty() ? 0
                                                                 : instruction.inputs[0].level);
    combine.payloads = payloads_.data();
    combine.count = static_cast<int>(payloads_.size());
    combine.position = instruction.position;
    const DType sum_dtype = accumulator_dtype(segment.dtype);
    if (instruction.local == Local::input) {
      combine.local = call_.tensors[slice->segment].in + slice->in_offset * size_of(segment.dtype);
    } else if (instruction.local == Local::accumulator) {
      combine.local = accumulator(piece, instruction.chunk) + accumulator_offset;
      combine.local_dtype = sum_dtype;
    }
    if (instruction.keep_partial_sum) {
      combine.out = accumulator(piece, instruction.chunk) + accumulator_offset;
      combine.out_dtype = sum_dtype;
    }
    accumulator_offset += round_up(slice->numel * size_of(sum_dtype), kCacheLine);
    const bool mixed = std::any_of(instruction.inputs.begin(), instruction.inputs.end(), [&](const BoxRef& input) {
      return std::memcmp(&segment.at(input.level), &codec, sizeof codec) != 0;
    });
    if (mixed) sum_mixed_codecs(instruction, *slice, combine);
    if (instruction.box >= 0) {
      combine.payload_out = box(piece, transport_.rank, instruction.box) + slice->at(instruction.level).offset;
      combine.stream_out = combine.stream_payload;  // a pass uses one kind of store
    }
    parallel_combine(threads_, *call_.kernels, codec, combine);
    if (instruction.output) apply_epilogue(*slice);
  }
}

// Sums terms of which some have another codec than the result: decodes them and adds them up in rank order, so that the
// result's encoding sees a single fp32 term.
void SlotPipeline::sum_mixed_codecs(const Instruction& instruction, const Slice& slice, Combine& combine) {
  const Segment& segment = plan_.segments()[slice.segment];
  const DType sum_dtype = accumulator_dtype(segment.dtype);
  const std::size_t stride = round_up(slice.numel * size_of(sum_dtype), kCacheLine);
  const std::size_t count = payloads_.size();
  decoded_terms_.resize((count + 2) * stride + kCacheLine);
  std::uint8_t* const terms =
      decoded_terms_.data() + (kCacheLine - reinterpret_cast<std::uintptr_t>(decoded_terms_.data()) % kCacheLine);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint8_t* const term = terms + i * stride;
    parallel_decode(threads_, *call_.kernels, segment.at(instruction.inputs[i].level), payloads_[i], slice.numel,
                    segment.dtype, term, sum_dtype, false);
    payloads_[i] = term;
  }
  Combine sum = combine;
  if (combine.local && combine.local_dtype != sum_dtype) {
    std::uint8_t* const local = terms + (count + 1) * stride;
    parallel_decode(threads_, *call_.kernels, Codec{}, static_cast<const std::uint8_t*>(combine.local), slice.numel,
                    combine.local_dtype, local, sum_dtype, false);
    sum.local = local;
    sum.local_dtype = sum_dtype;
  }
  sum.payloads = payloads_.data();
  sum.divisor = 1;
  sum.dtype = sum.out_dtype = sum_dtype;
  sum.out = terms + count * stride;
  sum.stream_out = false;
  // The residual is read and written with the encoding if its error is the new residual, and with the sum otherwise.
  const bool residual_with_encoding = instruction.writes_residual && instruction.box >= 0;
  if (residual_with_encoding) sum.residual_in = sum.residual_out = nullptr;
  parallel_combine(threads_, *call_.kernels, Codec{}, sum);
  combine.payloads = nullptr;
  combine.count = 0;
  combine.position = 0;
  combine.local = sum.out;
  combine.local_dtype = sum_dtype;
  if (!residual_with_encoding) combine.residual_in = combine.residual_out = nullptr;
}

void SlotPipeline::decode(std::size_t piece, const Instruction& instruction) {
  for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
       ++slice) {
    const Segment& segment = plan_.segments()[slice->segment];
    std::uint8_t* out = call_.tensors[slice->segment].out;
    if (!out) continue;
    out += slice->out_offset * size_of(segment.dtype);
    const std::uint8_t* payload = box(piece, instruction.peer, instruction.box) + slice->at(instruction.level).offset;
    parallel_decode(threads_, *call_.kernels, segment.at(instruction.level), payload, slice->numel, segment.dtype, out,
                    segment.dtype, plan_.streams_output(instruction.chunk));
    apply_epilogue(*slice);
  }
}

void SlotPipeline::forward(std::size_t piece, const Instruction& instruction) {
  parallel_copy(threads_, box(piece, transport_.rank, instruction.box),
                box(piece, instruction.peer, instruction.source),
                plan_.payload_bytes(piece, instruction.chunk, instruction.level));
}

void SlotPipeline::copy(std::size_t piece, const Instruction& instruction) {
  for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
       ++slice) {
    copy_slice(threads_, instruction, *slice);
    apply_epilogue(*slice);
  }
}

}  // namespace dtcomm
