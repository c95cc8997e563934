#include "engine/interpreter.h"

#include <algorithm>
#include <utility>

namespace dtcomm {
namespace {

// The scheduler moves processes between cores while a program runs, so the round trip is measured repeatedly: in
// the first operation, then in every 1024th of up to 16 KiB and every 8th of 2 MiB and more. Small operations, too,
// take longer if cores are far apart and the staging does not take that into account.
constexpr std::size_t kProbeBytes = 16 * 1024;    // of input
constexpr std::uint64_t kProbeInterval = 1024;    // times kProbeBytes
constexpr std::uint64_t kMaxProbeProgress = 128;  // times kProbeBytes that one operation counts for
constexpr double kFarNs = 250;                    // above it the cores share no cache, so non-temporal stores pay

}  // namespace

Interpreter::Interpreter(Transport& transport, Call call, std::uint64_t fingerprint, std::uint64_t number)
    : state_(transport, std::move(call), fingerprint, number) {
  transport.next_seq += state_.plan.pieces();
  if (ZeroCopy::is_excluded(state_)) mode_ = &slot_pipeline_.emplace(state_);
  // Ranks run the same operations, so all of them probe in the same ones.
  StagingPolicy& staging = transport.staging;
  if (staging.probes && state_.plan.input_bytes() > 0) {
    if (staging.until_probe == 0) {
      staging.until_probe = kProbeInterval;
      probe_ = std::make_unique<CacheLineProbe>(transport.rank, transport.peers, number);
    }
    const std::uint64_t progress = std::max<std::uint64_t>(state_.plan.input_bytes() / kProbeBytes, 1);
    staging.until_probe -= std::min({staging.until_probe, kMaxProbeProgress, progress});
  }
}

bool Interpreter::run_probe() {
  for (;;) {
    const CacheLineProbe::State probe = probe_->advance();
    if (probe == CacheLineProbe::State::finished) break;
    state_.waiting_for = probe_->partner();
    if (probe == CacheLineProbe::State::waiting) return false;
    state_.transport.wake_peers();
  }
  if (const double round_trip = probe_->round_trip_ns(); round_trip > 0) {
    state_.transport.staging.round_trip_ns = round_trip;
    state_.transport.staging.streaming = round_trip > kFarNs;
  }
  probe_.reset();
  return true;
}

bool Interpreter::choose_mode() {
  const std::optional<bool> zero_copy = ZeroCopy::is_possible(state_);
  if (!zero_copy) return false;
  if (*zero_copy) {
    mode_ = &zero_copy_.emplace(state_);
  } else {
    mode_ = &slot_pipeline_.emplace(state_);
  }
  return true;
}

Progress Interpreter::advance(int budget, bool ahead) {
  if (!begun_) {
    for (const LocalTask& task : state_.call.before) task(*state_.call.kernels);
    begun_ = true;
  }
  if (probe_ && !run_probe()) return Progress::blocked;
  if (!mode_ && !choose_mode()) return Progress::blocked;
  const Progress progress = mode_->advance(budget, ahead);
  if (progress == Progress::done) {
    for (const LocalTask& task : state_.call.after) task(*state_.call.kernels);
  }
  return progress;
}

}  // namespace dtcomm
