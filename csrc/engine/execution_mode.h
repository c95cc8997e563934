// The two ways of carrying out an operation (SlotPipeline, ZeroCopy) behind one interface, and what they share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/call.h"
#include "engine/phase_times.h"
#include "engine/transport.h"

namespace dtcomm {

// What a step of an operation did: it moved on, it cannot until a peer does, or the operation is complete.
enum class Progress { moved, blocked, done };

// A payload that did not arrive as it was sent.
struct CorruptPayload {
  int sender = -1;
  int chunk = 0;
  std::size_t piece = 0;
  std::string difference;
};

// One operation on one rank: its parts, and what has been found out while it runs.
struct OperationState {
  OperationState(Transport& transport, Call&& call, std::uint64_t fingerprint, std::uint64_t number)
      : transport(transport), call(std::move(call)), fingerprint(fingerprint), number(number) {}
  OperationState(const OperationState&) = delete;

  Transport& transport;
  Call call;
  const std::uint64_t fingerprint;     // of plan and number: equal on all ranks
  const std::uint64_t number;          // of the call, from 1 on
  std::uint64_t first_seq = 0;         // sequence number of the first piece, once the variant is chosen
  std::optional<std::uint64_t> trial;  // of the tuner: its number, if this operation is one
  std::uint64_t begin_ns = 0;          // of a trial or a message
  std::uint64_t busy_ns = 0;           // of a trial, in which this rank did not wait

  bool offer_open = true;           // while a receiver may still take this rank's offer
  std::uint64_t offered_until = 0;  // the time when that ends
  int waiting_for = -1;             // while blocked: the rank that the oldest piece waits for
  bool mismatch = false;            // a flag or header of another operation was read, of rank `waiting_for`
  std::optional<CorruptPayload> corrupt;
  std::uint64_t wire_bytes = 0;
  const bool timed = PhaseTimes::enabled().load(std::memory_order_relaxed);
  PhaseTimes times;

  const Plan& plan() const { return *call.plan; }
  const Program& program() const { return call.plan->program(); }
};

class ExecutionMode {
 public:
  explicit ExecutionMode(OperationState& state);
  virtual ~ExecutionMode() = default;
  ExecutionMode(const ExecutionMode&) = delete;

  // Runs at most `budget` instructions. `ahead`: the operation before is not complete, so this one must not publish
  // that it is done with pieces, because peers count those in order.
  virtual Progress advance(int budget, bool ahead) = 0;
  // Whether it may run ahead of the operation before.
  virtual bool may_run_ahead() const = 0;
  // Whether all pieces are under way, so that the next operation may begin as far as there are free slots.
  virtual bool all_pieces_started() const = 0;

 protected:
  // The arguments that every encoding and sum of a slice has in common.
  Combine combine_arguments(const Instruction& instruction, const Slice& slice) const;
  // Writes elements to the output as they are.
  void write_output(int threads, const Instruction& instruction, const std::uint8_t* in, std::size_t numel, DType dtype,
                    std::uint8_t* out) const;
  // Op::copy for one slice.
  void copy_slice(int threads, const Instruction& instruction, const Slice& slice) const;

  OperationState& state_;
  // Shorthands for the state's members.
  Transport& transport_;
  const Call& call_;
  const Plan& plan_;
  const Program& program_;
  const int threads_;                          // that this rank uses
  std::vector<const std::uint8_t*> payloads_;  // of the sum at hand
};

}  // namespace dtcomm
