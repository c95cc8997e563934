#include "engine/interpreter.h"

#include <algorithm>
#include <utility>

#include "engine/tuner.h"

namespace dtcomm {

Interpreter::Interpreter(Transport& transport, Call call, std::uint64_t fingerprint, std::uint64_t number)
    : state_(transport, std::move(call), fingerprint, number) {
  choose_variant();
}

// False if rank 0's decision is not known yet. Until it is, the number of pieces is not either, so the next operation
// cannot have begun.
bool Interpreter::choose_variant() {
  Transport& transport = state_.transport;
  if (transport.tuner && state_.plan().has_trials()) {
    const std::optional<Tuner::Choice> choice = transport.tuner->start(state_.plan().variants(), state_.number);
    if (!choice) {
      state_.waiting_for = 0;
      return false;
    }
    state_.trial = choice->trial;
    if (auto plan = state_.plan().with_variant(choice->variant, choice->tries)) {
      state_.call.plan = std::move(plan);
    }
  }
  state_.first_seq = transport.next_seq;
  transport.next_seq += state_.plan().pieces();
  if (state_.plan().zero_copy()) transport.wake_peers();  // they wait for this rank's announcement
  if (ZeroCopy::is_excluded(state_)) mode_ = &slot_pipeline_.emplace(state_);
  has_variant_ = true;
  return true;
}

bool Interpreter::choose_mode() {
  std::optional<bool> zero_copy = ZeroCopy::is_possible(state_);
  if (zero_copy && *zero_copy) zero_copy = ZeroCopy::is_agreed(state_);
  if (!zero_copy) return false;
  if (*zero_copy) {
    mode_ = &zero_copy_.emplace(state_);
  } else {
    mode_ = &slot_pipeline_.emplace(state_);
  }
  return true;
}

void Interpreter::record_trial(std::uint64_t end_ns) {
  const Transport& transport = state_.transport;
  const Tuner::OperationTimes times{*state_.trial, state_.number,  state_.begin_ns,
                                    end_ns,        state_.busy_ns, transport.last_begins_ns.back()};
  transport.tuner->record(times, state_.call.tensor_slot >= 0);
}

Progress Interpreter::advance(int budget, bool ahead) {
  if (!has_variant_ && !choose_variant()) return Progress::blocked;
  Transport& transport = state_.transport;
  const bool timed_message = state_.plan().has_trials() && state_.plan().variants().offers;
  if (!ahead && state_.begin_ns == 0 && (state_.trial || timed_message)) state_.begin_ns = transport.now();
  if (!begun_) {
    for (const LocalTask& task : state_.call.before) task(*state_.call.kernels);
    begun_ = true;
  }
  if (!mode_ && !choose_mode()) return Progress::blocked;
  const std::uint64_t since = state_.trial ? transport.now() : 0;
  const Progress progress = mode_->advance(budget, ahead);
  if (state_.trial && progress != Progress::blocked) {
    const std::uint64_t now = transport.now();
    state_.busy_ns += now - since;
    if (progress == Progress::done) record_trial(now);
  }
  if (progress == Progress::done) {
    if (timed_message) {
      auto& begins = transport.last_begins_ns;
      std::copy_backward(begins.begin(), begins.end() - 1, begins.end());
      begins.front() = state_.begin_ns;
    }
    for (const LocalTask& task : state_.call.after) task(*state_.call.kernels);
  }
  return progress;
}

}  // namespace dtcomm
