#include "engine/zero_copy.h"

#include <algorithm>

#include "engine/parallel_kernels.h"

namespace dtcomm {
namespace {

constexpr std::uint64_t kCopiedBytesPerNs = 10;

}  // namespace

bool ZeroCopy::is_excluded(const OperationState& state) {
  if (!state.plan().zero_copy()) return true;
  // This rank publishes something that peers cannot reach.
  const bool has_address = state.plan().single_copy() && state.call.address != 0;
  return state.program().publishes(state.transport.rank) && state.call.tensor_slot < 0 && !has_address;
}

std::optional<bool> ZeroCopy::is_possible(OperationState& state) {
  bool possible = true;
  for (int peer = 0; peer < state.transport.ranks; ++peer) {
    if (!state.program().publishes(peer)) continue;
    const OpHeader& header = state.transport.peer(peer).header->ops[state.number % kOpRing];
    if (header.number.load(std::memory_order_acquire) != state.number) {
      state.waiting_for = peer;
      return std::nullopt;
    }
    if (header.fingerprint.load(std::memory_order_relaxed) != state.fingerprint) {
      state.waiting_for = peer;
      state.mismatch = true;
      return std::nullopt;
    }
    possible = possible && (header.tensor_slot.load(std::memory_order_relaxed) >= 0 ||
                            (state.plan().single_copy() && header.address.load(std::memory_order_relaxed) != 0));
  }
  return possible;
}

std::optional<bool> ZeroCopy::is_agreed(OperationState& state) {
  if (!state.plan().offers()) return true;
  Transport& transport = state.transport;
  const int peer = 1 - transport.rank;  // an offer is of one of two ranks to the other
  const bool sends = state.program().publishes(transport.rank);
  const OpHeader& offer = transport.peer(sends ? transport.rank : peer).header->ops[state.number % kOpRing];
  if (offer.tensor_slot.load(std::memory_order_relaxed) >= 0) return true;
  OfferWords& own = transport.own().header->offer;
  const OfferWords& other = transport.peer(peer).header->offer;
  if (!sends) {
    const bool copies = take_offer(own, other, state.number);
    transport.wake_peers();
    return copies;
  }
  std::optional<bool> copies = answer_to_offer(other, state.number);
  if (copies) return copies;
  // As long as this rank's own copy takes, so that waiting in vain at most doubles the sender's time.
  const std::uint64_t now = transport.now();
  if (state.offered_until == 0) state.offered_until = now + state.plan().input_bytes() / kCopiedBytesPerNs;
  if (now >= state.offered_until) state.offer_open = false;
  if (!state.offer_open) copies = withdraw_offer(own, other, state.number);
  if (!copies) state.waiting_for = peer;
  return copies;
}

ZeroCopy::ZeroCopy(OperationState& state) : ExecutionMode(state) {
  for (int peer = 0; peer < transport_.ranks; ++peer) {
    tensors_.push_back({call_.tensors[0].in, 0, {}});
    // Only tensors that this rank accesses: the owner of another may already have freed it.
    const bool accesses = program_.sends_sums || program_.receives_from[static_cast<std::size_t>(peer)];
    if (peer == transport_.rank || !program_.publishes(peer) || !accesses) continue;
    const OpHeader& header = transport_.peer(peer).header->ops[state_.number % kOpRing];
    const SharedTensorLocation location{header.tensor_slot.load(std::memory_order_relaxed),
                                        header.tensor_id.load(std::memory_order_relaxed),
                                        header.tensor_offset.load(std::memory_order_relaxed)};
    if (location.slot >= 0) {
      tensors_.back().data = transport_.map_tensor(peer, location, plan_.input_bytes_of(peer));
    } else {
      tensors_.back().data = nullptr;
      tensors_.back().remote_address = header.address.load(std::memory_order_relaxed);
    }
  }
}

// Every input is available once its rank has announced the operation, so nothing waits between the pieces, and a rank
// that is delayed for a moment does not delay the others. A rank may use its tensor again when those that read it, or
// write into it, are done.
Progress ZeroCopy::advance(int budget, bool /*ahead*/) {
  const std::size_t pieces = plan_.pieces();
  bool moved = false;
  if (next_piece_ < pieces && budget > 0) {
    const std::size_t end = std::min(pieces, next_piece_ + static_cast<std::size_t>(budget));
    const std::uint64_t begin_ns = state_.timed ? now_ns() : 0;
    run_pieces(next_piece_, end);
    if (state_.timed) state_.times.add(Phase::reduce, begin_ns, now_ns());
    next_piece_ = end;
    moved = true;
    if (next_piece_ == pieces) {
      for (int peer = 0; peer < transport_.ranks; ++peer) {
        if (tensors_[static_cast<std::size_t>(peer)].remote_address != 0) transport_.require_alive(peer);
      }
      transport_.publish_pieces_done(state_.first_seq + pieces);
    }
  }
  if (next_piece_ < pieces) return Progress::moved;
  for (int peer = 0; peer < transport_.ranks; ++peer) {
    if (!is_accessed_by(peer)) continue;
    if (transport_.peer(peer).pieces_done->load(std::memory_order_acquire) < state_.first_seq + pieces) {
      state_.waiting_for = peer;
      return moved ? Progress::moved : Progress::blocked;
    }
  }
  // Until now peers may have written into the tensor.
  if (call_.epilogue.apply) call_.epilogue.apply(*call_.kernels, 0, plan_.segments()[0].numel);
  return Progress::done;
}

// Whether the peer reads this rank's tensor or writes into it.
bool ZeroCopy::is_accessed_by(int peer) const {
  if (peer == transport_.rank) return false;
  return program_.sends_sums || program_.sends_to[static_cast<std::size_t>(peer)];
}

// Threads share out the pieces, or each piece if there are few.
void ZeroCopy::run_pieces(std::size_t begin, std::size_t end) {
  for (std::size_t piece = begin; piece < end; ++piece) state_.wire_bytes += sent_bytes(piece);
  const bool many_pieces = end - begin >= kPartsPerThread * static_cast<std::size_t>(threads_);
  if (threads_ > 1 && many_pieces && !reads_private_memory()) {
    ThreadPool::instance().run(threads_, end - begin, [&](std::size_t part) {
      Payloads payloads;
      run_piece(begin + part, 1, payloads);
    });
    return;
  }
  for (std::size_t piece = begin; piece < end; ++piece) run_piece(piece, threads_, payloads_);
  for (int peer = 0; peer < transport_.ranks; ++peer) run_read(peer);
}

bool ZeroCopy::reads_private_memory() const {
  return std::any_of(tensors_.begin(), tensors_.end(),
                     [](const PeerTensor& tensor) { return tensor.remote_address != 0; });
}

std::size_t ZeroCopy::sent_bytes(std::size_t piece) const {
  std::size_t bytes = 0;
  for (const Instruction& instruction : program_.instructions) {
    if (instruction.op != Op::send) continue;
    bytes += plan_.payload_bytes(piece, instruction.chunk, 0) * instruction.peers.size();
  }
  return bytes;
}

// Copies the owner's elements of a slice to `out`, or adds them to what is read from it.
void ZeroCopy::fetch(int owner, const Slice& slice, const Instruction& instruction, int threads, std::uint8_t* out) {
  const DType dtype = plan_.segments()[slice.segment].dtype;
  const std::size_t offset = slice.in_offset * size_of(dtype);
  const PeerTensor& tensor = tensors_[static_cast<std::size_t>(owner)];
  if (tensor.remote_address != 0) {
    add_read(owner, {tensor.remote_address + offset, out, slice.numel * size_of(dtype)});
  } else {
    write_output(threads, instruction, tensor.data + offset, slice.numel, dtype, out);
  }
}

void ZeroCopy::add_read(int owner, const Read& read) {
  Read& last = tensors_[static_cast<std::size_t>(owner)].pending;
  if (last.bytes > 0 && last.address + last.bytes == read.address && last.out + last.bytes == read.out) {
    last.bytes += read.bytes;
    return;
  }
  run_read(owner);
  last = read;
}

void ZeroCopy::run_read(int owner) {
  Read& read = tensors_[static_cast<std::size_t>(owner)].pending;
  if (read.bytes == 0) return;
  for_ranges(threads_, read.bytes, read.bytes, kPage, [&](std::size_t begin, std::size_t end) {
    transport_.read_memory(owner, read.address + begin, read.out + begin, end - begin);
  });
  read.bytes = 0;
}

void ZeroCopy::run_piece(std::size_t piece, int threads, Payloads& payloads) {
  // The rank that sums a chunk writes the result into every rank's tensor, so it need not be fetched.
  const bool writes_into_peers = program_.sends_sums;
  for (const Instruction& instruction : program_.instructions) {
    const Slice* const begin = plan_.begin(piece, instruction.chunk);
    const Slice* const end = plan_.end(piece, instruction.chunk);
    if (instruction.op == Op::copy) {
      for (const Slice* slice = begin; slice != end; ++slice) copy_slice(threads, instruction, *slice);
    } else if (instruction.op == Op::reduce) {
      reduce(piece, instruction, threads, payloads);
    } else if (!writes_into_peers && (instruction.op == Op::decode || instruction.op == Op::encode)) {
      if (instruction.op == Op::encode && !instruction.output) continue;
      const int owner = instruction.op == Op::decode ? instruction.peer : transport_.rank;
      for (const Slice* slice = begin; slice != end; ++slice) {
        std::uint8_t* const out = call_.tensors[slice->segment].out;
        if (!out) continue;
        fetch(owner, *slice, instruction, threads,
              out + slice->out_offset * size_of(plan_.segments()[slice->segment].dtype));
      }
    }
  }
}

void ZeroCopy::reduce(std::size_t piece, const Instruction& instruction, int threads, Payloads& payloads) const {
  const bool writes_into_peers = program_.sends_sums;
  for (const Slice* slice = plan_.begin(piece, instruction.chunk); slice != plan_.end(piece, instruction.chunk);
       ++slice) {
    const Segment& segment = plan_.segments()[slice->segment];
    const std::size_t offset = slice->in_offset * size_of(segment.dtype);
    const std::size_t bytes = slice->numel * size_of(segment.dtype);
    Combine combine = combine_arguments(instruction, *slice);
    payloads.clear();
    for (const BoxRef& input : instruction.inputs) payloads.push_back(mapped(input.rank) + offset);
    combine.payloads = payloads.data();
    combine.count = static_cast<int>(payloads.size());
    combine.position = instruction.position;
    if (instruction.local == Local::input) combine.local = call_.tensors[slice->segment].in + offset;
    combine.stream_payload = false;
    if (writes_into_peers) combine.stream_out = false;
    // The kernel writes two results: the output and, for the first peer, the payload. A payload with padding would
    // overwrite the elements behind it.
    int written_by_kernel = -1;
    if (writes_into_peers && bytes == slice->inside.bytes) {
      written_by_kernel = transport_.rank == 0 ? 1 : 0;
      combine.payload_out = mapped(written_by_kernel) + offset;
    }
    parallel_combine(threads, *call_.kernels, segment.codec, combine);
    if (!writes_into_peers) continue;
    for (int peer = 0; peer < transport_.ranks; ++peer) {
      if (peer == transport_.rank || peer == written_by_kernel) continue;
      parallel_copy(threads, mapped(peer) + offset, combine.out, bytes);
    }
  }
}

}  // namespace dtcomm
