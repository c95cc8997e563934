// What the instructions of a program do to tensors and boxes.
#include <algorithm>
#include <cstring>

#include "codec/counter_rng.h"
#include "engine/interpreter.h"

namespace dtcomm {

void Machine::compute(std::size_t piece, const Instruction& instruction) {
  switch (instruction.op) {
    case Op::encode:
      return encode(piece, instruction);
    case Op::reduce:
      return reduce(piece, instruction);
    case Op::decode:
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
    if (instruction.reads_residual) call.residual_in = pointers.residual + slice.in_offset;
    if (instruction.writes_residual) call.residual_out = pointers.residual + slice.in_offset;
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
    if (instruction.output) arrived(*slice);
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
    if (instruction.output) arrived(*slice);
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
  const bool settles = instruction.writes_residual && instruction.box >= 0;  // its encoding's error
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
    arrived(*slice);
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
    arrived(*slice);
  }
}

}  // namespace dtcomm
