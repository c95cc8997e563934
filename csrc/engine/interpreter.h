// The interpreter: one operation on one rank as a resumable state machine. It never waits: its
// caller (Communicator, SimulatedWorld) decides what to do while it is blocked.
//
// An operation first learns its variant from the tuner, then runs the tasks before it, then chooses its execution mode
// (SlotPipeline or ZeroCopy), which carries out the program, and at last runs the tasks behind it.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/execution_mode.h"
#include "engine/slot_pipeline.h"
#include "engine/zero_copy.h"

namespace dtcomm {

class Interpreter {
 public:
  // `fingerprint` identifies the operation among the ranks (see announce()); `number` is its call number, from 1 on.
  Interpreter(Transport& transport, Call call, std::uint64_t fingerprint, std::uint64_t number);

  // Runs at most `budget` instructions. `ahead`: the operation before is not complete; this one then does everything
  // but publish that it is done with pieces, because peers count those in order.
  Progress advance(int budget = 1 << 30, bool ahead = false);
  // All pieces are in flight: the next operation may begin, as far as there are free slots.
  bool all_pieces_started() const { return mode_ && mode_->all_pieces_started(); }
  // advance() may be called with `ahead`.
  bool may_run_ahead() const { return mode_ && mode_->may_run_ahead(); }

  // The thread that runs it is about to sleep: an offer that no receiver has taken is to be withdrawn.
  void end_offer() { state_.offer_open = false; }

  const Call& call() const { return state_.call; }
  std::uint64_t fingerprint() const { return state_.fingerprint; }
  std::uint64_t number() const { return state_.number; }
  std::uint64_t wire_bytes() const { return state_.wire_bytes; }
  // While blocked: the rank that the oldest piece waits for, or -1.
  int waiting_for() const { return state_.waiting_for; }
  // A flag or header of another operation was read, of rank waiting_for().
  bool mismatch() const { return state_.mismatch; }
  // A payload that did not have its checksum; the operation cannot go on.
  const std::optional<CorruptPayload>& corrupt() const { return state_.corrupt; }
  // All zero unless timing was on when the operation started.
  const PhaseTimes& times() const { return state_.times; }

 private:
  bool choose_variant();
  bool choose_mode();
  void record_trial(std::uint64_t end_ns);

  OperationState state_;
  bool has_variant_ = false;
  bool begun_ = false;
  // The mode, once it is chosen: one of the two behind it. They are stored in place to save an allocation.
  ExecutionMode* mode_ = nullptr;
  std::optional<SlotPipeline> slot_pipeline_;
  std::optional<ZeroCopy> zero_copy_;
};

}  // namespace dtcomm
