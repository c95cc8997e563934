#include "engine/execution_mode.h"

#include "codec/counter_rng.h"
#include "engine/parallel_kernels.h"

namespace dtcomm {

ExecutionMode::ExecutionMode(OperationState& state)
    : state_(state),
      transport_(state.transport),
      call_(state.call),
      plan_(state.plan()),
      program_(state.program()),
      threads_(plan_.threads()) {
  payloads_.reserve(static_cast<std::size_t>(transport_.ranks));
}

Combine ExecutionMode::combine_arguments(const Instruction& instruction, const Slice& slice) const {
  const DType dtype = plan_.segments()[slice.segment].dtype;
  const TensorPointers& tensors = call_.tensors[slice.segment];
  Combine combine;
  combine.numel = slice.numel;
  combine.op = plan_.op();
  combine.dtype = combine.local_dtype = combine.out_dtype = dtype;
  combine.offset = slice.in_offset;
  if (instruction.divide) combine.divisor = plan_.divisor();
  if (instruction.box >= 0) {
    combine.key =
        mix_key(call_.seed, static_cast<std::uint32_t>(transport_.rank), static_cast<std::uint32_t>(instruction.box));
    combine.stream_payload = plan_.streams_payload();
  }
  if (tensors.residual) {
    if (instruction.reads_residual) combine.residual_in = tensors.residual + slice.in_offset;
    if (instruction.writes_residual) combine.residual_out = tensors.residual + slice.in_offset;
  }
  if (instruction.output && tensors.out) {
    combine.out = tensors.out + slice.out_offset * size_of(dtype);
    combine.stream_out = plan_.streams_output(instruction.chunk);
  }
  return combine;
}

void ExecutionMode::write_output(int threads, const Instruction& instruction, const std::uint8_t* in, std::size_t numel,
                                 DType dtype, std::uint8_t* out) const {
  if (out == in) return;
  parallel_decode(threads, *call_.kernels, Codec{}, in, numel, dtype, out, dtype,
                  plan_.streams_output(instruction.chunk));
}

void ExecutionMode::copy_slice(int threads, const Instruction& instruction, const Slice& slice) const {
  const TensorPointers& tensors = call_.tensors[slice.segment];
  if (!tensors.out) return;
  const DType dtype = plan_.segments()[slice.segment].dtype;
  write_output(threads, instruction, tensors.in + slice.in_offset * size_of(dtype), slice.numel, dtype,
               tensors.out + slice.out_offset * size_of(dtype));
}

}  // namespace dtcomm
