// Operations on tensors that lie in shared memory (codec none): the ranks read and write each other's tensors, and
// meet only at the start and at the end.
#include <algorithm>
#include <cstring>

#include "engine/interpreter.h"
#include "engine/process_page.h"

namespace dtcomm {

// Direct operations take place where the peers can reach the tensors of all ranks that give something, mapped or by
// pulling; otherwise the payloads go through the slots. All ranks read the same headers, so all decide alike.
bool Machine::meet() {
  bool all = true;
  for (int peer = 0; peer < fabric_.ranks; ++peer) {
    if (!program_.publishes(peer)) continue;
    const OpHeader& header = fabric_.peers[static_cast<std::size_t>(peer)].head->ops[number_ % kOpRing];
    if (header.number.load(std::memory_order_acquire) != number_) {
      blocker_ = peer;
      return false;
    }
    if (header.fingerprint.load(std::memory_order_relaxed) != operation_) {
      blocker_ = peer;
      mismatch_ = true;
      return false;
    }
    all = all &&
          (header.region.load(std::memory_order_relaxed) >= 0 || header.address.load(std::memory_order_relaxed) != 0);
  }
  met_ = true;
  if (!all) return true;
  direct_ = true;
  for (int peer = 0; peer < fabric_.ranks; ++peer) {
    peer_tensors_.push_back(const_cast<std::uint8_t*>(call_.segments[0].in));
    pulled_.push_back(0);
    // Of others it knows nothing: one whose readers are done may have let go of its tensor.
    const bool touches = program_.sends_sums || program_.receives_from[static_cast<std::size_t>(peer)];
    if (peer == fabric_.rank || !program_.publishes(peer) || !touches) continue;
    const OpHeader& header = fabric_.peers[static_cast<std::size_t>(peer)].head->ops[number_ % kOpRing];
    const std::int64_t region = header.region.load(std::memory_order_relaxed);
    if (region >= 0) {
      peer_tensors_.back() =
          fabric_.resolve(peer, region, header.region_id.load(std::memory_order_relaxed),
                          header.region_offset.load(std::memory_order_relaxed), plan_.given_bytes(peer));
    } else {
      peer_tensors_.back() = nullptr;
      pulled_.back() = header.address.load(std::memory_order_relaxed);
    }
  }
  return true;
}

// Every input is there once its rank has announced the operation, so nothing waits between the pieces: a rank that
// is held up for a moment does not hold up the others. A rank may touch its tensor again when those that read it, or
// write into it, are done.
Progress Machine::advance_direct(int budget) {
  const std::size_t pieces = plan_.pieces();
  bool moved = false;
  for (; oldest_ < pieces && budget > 0; --budget) {
    const std::uint64_t begin = timed_ ? now_ns() : 0;
    run_direct(oldest_++);
    if (timed_) times_.add(Phase::reduce, begin, now_ns());
    moved = true;
    if (oldest_ < pieces) continue;
    for (int peer = 0; peer < fabric_.ranks; ++peer) {
      if (pulled_[static_cast<std::size_t>(peer)] != 0) fabric_.confirm(peer);
    }
    fabric_.publish_done(base_ + pieces);
  }
  if (oldest_ < pieces) return Progress::moved;
  for (int peer = 0; peer < fabric_.ranks; ++peer) {
    if (!read_by_peers(peer)) continue;
    const auto& done = *fabric_.peers[static_cast<std::size_t>(peer)].done;
    if (done.load(std::memory_order_acquire) < base_ + pieces) {
      blocker_ = peer;
      return moved ? Progress::moved : Progress::blocked;
    }
  }
  return Progress::done;
}

// Whether the peer touches this rank's tensor in a direct operation.
bool Machine::read_by_peers(int peer) const {
  if (peer == fabric_.rank) return false;
  return program_.sends_sums || program_.sends_to[static_cast<std::size_t>(peer)];
}

// What the owner has of a slice, as it is, into the output.
void Machine::take(int owner, const Slice& slice, const Instruction& instruction, std::uint8_t* out) {
  const DType dtype = plan_.segments()[slice.segment].dtype;
  const std::size_t offset = slice.in_offset * size_of(dtype);
  const auto index = static_cast<std::size_t>(owner);
  if (pulled_[index] != 0) {
    fabric_.pull(owner, pulled_[index] + offset, out, slice.numel * size_of(dtype));
  } else {
    put(instruction, peer_tensors_[index] + offset, slice.numel, dtype, out);
  }
}

void Machine::run_direct(std::size_t piece) {
  const bool pushes = program_.sends_sums;  // whoever sums a chunk writes it into every tensor
  for (const Instruction& instruction : program_.instructions) {
    if (instruction.op == Op::copy) {
      copy(piece, instruction);
    } else if (instruction.op == Op::send) {
      wire_bytes_ += plan_.payload_bytes(piece, instruction.chunk, 0) * instruction.peers.size();
    } else if (instruction.op == Op::reduce) {
      reduce_direct(piece, instruction);
    } else if (!pushes && (instruction.op == Op::decode || instruction.op == Op::encode)) {
      const int owner = instruction.op == Op::decode ? instruction.peer : fabric_.rank;
      for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
           ++slice) {
        std::uint8_t* out = call_.segments[slice->segment].out;
        const bool wanted = instruction.op == Op::decode || instruction.output;
        if (!out || !wanted) continue;
        take(owner, *slice, instruction, out + slice->out_offset * size_of(plan_.segments()[slice->segment].dtype));
      }
    }
  }
}

void Machine::reduce_direct(std::size_t piece, const Instruction& instruction) {
  const bool pushes = program_.sends_sums;
  for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
       ++slice) {
    const Segment& segment = plan_.segments()[slice->segment];
    const std::size_t offset = slice->in_offset * size_of(segment.dtype);
    const std::size_t bytes = slice->numel * size_of(segment.dtype);
    Combine call = combine_for(instruction, *slice);
    payloads_.clear();
    for (const BoxRef& input : instruction.inputs) {
      payloads_.push_back(peer_tensors_[static_cast<std::size_t>(input.rank)] + offset);
    }
    call.payloads = payloads_.data();
    call.count = static_cast<int>(payloads_.size());
    call.position = instruction.position;
    if (instruction.local == Local::input) call.local = call_.segments[slice->segment].in + offset;
    call.stream_payload = false;
    if (pushes) call.stream_out = false;
    int first = -1;
    if (pushes && bytes == slice->inside.bytes) {  // no padding that would spill into the elements behind
      first = fabric_.rank == 0 ? 1 : 0;
      call.payload_out = peer_tensors_[static_cast<std::size_t>(first)] + offset;
    }
    call_.kernels->combine(segment.codec, call);
    if (!pushes) continue;
    for (int peer = 0; peer < fabric_.ranks; ++peer) {
      if (peer == fabric_.rank || peer == first) continue;
      std::memcpy(peer_tensors_[static_cast<std::size_t>(peer)] + offset, call.out, bytes);
    }
  }
}

}  // namespace dtcomm
