// Zero copy: ranks read and write each other's tensors themselves (codec none), mapped from shared memory or copied
// out of their owner's private memory, and synchronise only at the start and at the end.
//
// Which side decides which copy is made:
//
//   - Python decides for each plan, alike on all ranks, what the operation may use: PlanSpec::zero_copy, and single
//     copies in its variants, from the operation's size, codec and algorithm, the environment and the machine
//     (dtcomm/runtime/native/copy_policy.py). The engine does not check any of that again.
//   - The tuner chooses among the variants (tuner.h).
//   - The engine decides for each call, from where the tensors lie, whether the operation does use it. A rank announces
//     its input's place in shared memory and, if some variant is single copy, its address. If a rank that publishes has
//     announced nothing that the variant may use, all ranks use the slots (slot_pipeline.h).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/execution_mode.h"

namespace dtcomm {

class ZeroCopy final : public ExecutionMode {
 public:
  // Whether this rank can be sure, without its peers' op headers, that the operation goes through the slots.
  static bool is_excluded(const OperationState& state);
  // Whether the tensors of all ranks that publish something can be reached; nothing until all have announced the
  // operation. All ranks read the same headers, so all decide alike.
  static std::optional<bool> is_possible(OperationState& state);

  // Whether the only rank that publishes and the one that receives agree on it, if it is an offer (offer.h); nothing
  // while that is open.
  static std::optional<bool> is_agreed(OperationState& state);

  // Maps the peers' tensors; throws if that fails.
  explicit ZeroCopy(OperationState& state);

  Progress advance(int budget, bool ahead) override;
  // Peers may access this rank's tensor from the announcement on, so nothing may run ahead of another operation.
  bool may_run_ahead() const override { return false; }
  bool all_pieces_started() const override { return false; }

 private:
  // A part of a peer's private memory that is to be copied.
  struct Read {
    std::uint64_t address = 0;
    std::uint8_t* out = nullptr;
    std::size_t bytes = 0;
  };
  // A rank's tensor: mapped at `data`, or at `remote_address` in its owner's private memory.
  struct PeerTensor {
    std::uint8_t* data = nullptr;
    std::uint64_t remote_address = 0;
    // What is read with the next call of the kernel: pieces whose memory adjoins are read together, because each call
    // costs about a microsecond.
    Read pending;
  };

  using Payloads = std::vector<const std::uint8_t*>;

  void run_pieces(std::size_t begin, std::size_t end);
  // Several threads may run different pieces, unless tensors are read out of private memory; `threads` may work on this
  // one, and `payloads` is memory for its sums.
  void run_piece(std::size_t piece, int threads, Payloads& payloads);
  void reduce(std::size_t piece, const Instruction& instruction, int threads, Payloads& payloads) const;
  void fetch(int owner, const Slice& slice, const Instruction& instruction, int threads, std::uint8_t* out);
  void add_read(int owner, const Read& read);
  void run_read(int owner);
  bool reads_private_memory() const;
  std::size_t sent_bytes(std::size_t piece) const;
  bool is_accessed_by(int peer) const;
  std::uint8_t* mapped(int rank) const { return tensors_[static_cast<std::size_t>(rank)].data; }

  std::size_t next_piece_ = 0;
  std::vector<PeerTensor> tensors_;  // by rank
};

}  // namespace dtcomm
