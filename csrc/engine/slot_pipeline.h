// The slot pipeline: payloads are encoded into boxes of this rank's slots, and peers read them there (or get them over
// TCP or UCX). Several pieces are in flight, each at its own instruction.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/execution_mode.h"

namespace dtcomm {

class SlotPipeline final : public ExecutionMode {
 public:
  explicit SlotPipeline(OperationState& state);

  Progress advance(int budget, bool ahead) override;
  bool may_run_ahead() const override { return true; }
  bool all_pieces_started() const override { return started_ == plan_.pieces(); }

 private:
  bool can_start(std::size_t piece);
  bool is_done_by_all(std::uint64_t need);
  bool run_piece(std::size_t piece, int& budget);
  // Runs one instruction; false if it is blocked.
  bool execute(std::size_t piece, const Instruction& instruction);
  void compute(std::size_t piece, const Instruction& instruction);
  bool received(std::size_t piece, const Instruction& instruction);
  bool fills_box(const ArrivedBytes& arrived, std::size_t piece, const Instruction& instruction);
  bool checksum_matches(std::size_t piece, const Instruction& instruction);
  void publish(std::size_t piece, const Instruction& instruction);
  void encode(std::size_t piece, const Instruction& instruction);
  void reduce(std::size_t piece, const Instruction& instruction);
  void sum_mixed_codecs(const Instruction& instruction, const Slice& slice, Combine& combine);
  void decode(std::size_t piece, const Instruction& instruction);
  void forward(std::size_t piece, const Instruction& instruction);
  void copy(std::size_t piece, const Instruction& instruction);
  void apply_epilogue(const Slice& slice) const {
    if (call_.epilogue.apply) call_.epilogue.apply(*call_.kernels, slice.out_offset, slice.numel);
  }
  std::uint8_t* box(std::size_t piece, int rank, int index) const;
  std::uint8_t* accumulator(std::size_t piece, int chunk);

  // Pieces [oldest_, started_) are in flight; those before are finished.
  std::size_t oldest_ = 0;
  std::size_t started_ = 0;
  std::size_t next_instruction_[kSlots] = {};            // by slot
  std::vector<std::vector<std::uint8_t>> accumulators_;  // by slot: partial sums of all chunks
  std::vector<std::uint8_t> decoded_terms_;              // of sums over several codecs
};

}  // namespace dtcomm
