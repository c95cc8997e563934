#include "engine/tuner.h"

#include <algorithm>

namespace dtcomm {
namespace {

constexpr std::uint64_t kUntimed = 2;  // the first operations of a class touch memory for the first time
constexpr std::uint64_t kLeastRounds =
    3;                                 // in which each candidate of a stage is tried, and times that a decision needs
constexpr double kBetter = 0.97;       // of the time of the variant in use: only what takes less replaces it
constexpr std::uint64_t kRest = 6400;  // operations between two searches, with Tuner::always

// When rank 0 starts an operation, every other rank has finished all pieces but the last kSlots, because no rank gets
// further ahead. Each operation has at least one piece. So kSlots + 1 operations behind the stage all ranks have ended
// it; one more, and they have also recorded their times, which they do before their next operation.
constexpr std::uint64_t kDecide = kSlots + 2;
// A rank may be kSlots operations ahead of rank 0. With 2 * kSlots + 2 none would wait if rank 0 published at once.
constexpr std::uint64_t kAdopt = 3 * kSlots;

// The time from the start of one message to the start of the next counts up to so many times the message's own:
// messages in both directions take up to twice as long, and what is longer is not due to them.
constexpr std::uint64_t kMostOfMessage = 3;

// Disturbances make operations take longer, so the lower quartile shows what they take otherwise. A disturbed message
// makes the interval before it longer and the one behind it shorter; of intervals it is the median.
double typical(std::vector<double>& values, bool messages) {
  const auto place = values.begin() + static_cast<std::ptrdiff_t>(values.size() / (messages ? 2 : 4));
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

// The values that the stage of a property compares, beside the other properties of the variant in use. The order does
// not depend on the value in use: two ranks that send to each other then try the same ones at the same time.
enum Property { kCopies, kThreads, kStoresAndProgram, kPieceSize, kProperties };

std::vector<Variant> candidates_of(const Variants& variants, const Variant& in_use, int property) {
  std::vector<Variant> candidates{in_use};
  const Variant& tries = variants.tries;
  const auto add_both_values = [&](bool Variant::* value) {
    if (!(tries.*value)) return;
    for (Variant& candidate : candidates) candidate.*value = false;
    for (std::size_t i = 0, count = candidates.size(); i < count; ++i) {
      candidates.push_back(candidates[i]);
      candidates.back().*value = true;
    }
  };
  switch (property) {
    case kCopies:
      add_both_values(&Variant::single_copy);
      break;
    case kThreads:
      add_both_values(&Variant::parallel);
      break;
    case kStoresAndProgram:
      add_both_values(&Variant::alternative);
      if (!in_use.single_copy) add_both_values(&Variant::stream_payload);  // otherwise there are no payloads
      add_both_values(&Variant::stream_output);
      break;
    default:
      candidates.clear();
      for (const std::size_t bytes : variants.piece_sizes) {
        candidates.push_back(in_use);
        candidates.back().piece_bytes = bytes;
      }
  }
  return candidates;
}

}  // namespace

Tuner::SizeClass* Tuner::find(const Variants& variants) {
  if (const auto found = classes_.find(variants.key()); found != classes_.end()) return &found->second;
  if (classes_.size() == kSizeClasses) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  SizeClass size_class;
  size_class.index = classes_.size();
  size_class.variants = variants;
  size_class.report.name = variants.size_class;
  size_class.report.variant = variants;
  begin_stage(size_class, kUntimed);
  return &classes_.emplace(variants.key(), std::move(size_class)).first->second;
}

// Begins the stage of the next property that has several values. The caller holds the mutex.
void Tuner::begin_stage(SizeClass& size_class, std::uint64_t begin) {
  for (int seen = 0; seen < kProperties; ++seen) {
    if (size_class.property == kProperties) {
      size_class.report.settled = true;
      if (!always) break;
      size_class.property = 0;
      begin += kRest;
    }
    const Variants& variants = size_class.variants;
    size_class.candidates = candidates_of(variants, size_class.report.variant, size_class.property++);
    const std::uint64_t row = size_class.candidates.size() * variants.repeats;
    if (size_class.candidates.size() < 2) continue;
    size_class.begin = begin;
    size_class.length = std::max(kLeastRounds, variants.operations_of_stage / row) * row;
    size_class.trials.clear();
    return;
  }
  size_class.report.settled = true;
  size_class.begin = UINT64_MAX;
}

std::optional<Tuner::Choice> Tuner::start(const Variants& variants, std::uint64_t operation) {
  SizeClass* const found = find(variants);
  if (!found) return Choice{variants, false, std::nullopt};
  SizeClass& size_class = *found;
  if (size_class.count >= size_class.begin) {
    const std::uint64_t since = size_class.count - size_class.begin;
    if (since < size_class.length) {
      ++size_class.count;
      Choice choice{size_class.candidates[since / variants.repeats % size_class.candidates.size()], true, std::nullopt};
      if (since % variants.repeats == variants.repeats - 1) {
        size_class.trials.push_back({next_trial_, operation});
        choice.trial = next_trial_++;
      }
      return choice;
    }
    if (since == size_class.length + kDecide && transport_.rank == 0) decide(size_class);
    if (since == size_class.length + kAdopt && !adopt(size_class)) return std::nullopt;
  }
  ++size_class.count;
  return Choice{size_class.report.variant, false, std::nullopt};
}

// Rank 0 reads while others may write an entry anew. The stores are releases, so none moves before the zero: if a
// reader finds the same operation before and after its loads, they are the times of that operation.
void Tuner::record(const OperationTimes& times, bool shared_tensor) {
  TrialTimes& own = transport_.own().board->trials[times.trial % kTrials];
  own.operation.store(0, std::memory_order_release);
  own.begin_ns.store(times.begin_ns, std::memory_order_release);
  own.end_ns.store(times.end_ns, std::memory_order_release);
  own.previous_begin_ns.store(times.previous_begin_ns, std::memory_order_release);
  own.busy_ns.store(times.busy_ns, std::memory_order_release);
  own.shared_tensor.store(shared_tensor, std::memory_order_release);
  own.operation.store(times.operation, std::memory_order_release);
}

// Nothing if rank 0's tensor was of the other kind, or a later trial has taken the place of a rank's times.
std::optional<double> Tuner::microseconds_of(bool message, const Trial& trial, bool shared_tensor) const {
  const TrialTimes& own = transport_.own().board->trials[trial.number % kTrials];
  if (own.shared_tensor.load(std::memory_order_acquire) != shared_tensor) return std::nullopt;
  std::uint64_t last_begin = 0, last_end = 0, previous_begin = 0, busy = 0, most_busy = 0;
  for (const PeerView& peer : transport_.peers) {
    const TrialTimes& times = peer.board->trials[trial.number % kTrials];
    if (times.operation.load(std::memory_order_acquire) != trial.operation) return std::nullopt;
    last_begin = std::max(last_begin, times.begin_ns.load(std::memory_order_acquire));
    last_end = std::max(last_end, times.end_ns.load(std::memory_order_acquire));
    previous_begin = std::max(previous_begin, times.previous_begin_ns.load(std::memory_order_acquire));
    const std::uint64_t busy_of_rank = times.busy_ns.load(std::memory_order_acquire);
    busy += busy_of_rank;
    most_busy = std::max(most_busy, busy_of_rank);
    if (times.operation.load(std::memory_order_acquire) != trial.operation) return std::nullopt;
  }
  if (last_end <= last_begin) return std::nullopt;
  std::uint64_t time = last_end - last_begin;
  if (message && previous_begin > 0 && last_begin > previous_begin) {
    time = std::min(kMostOfMessage * std::max(time, most_busy), (last_begin - previous_begin) / kMessagesTimed);
  }
  double nanoseconds = static_cast<double>(time);
  if (cores_per_rank < 1) {  // while this rank waits, another one may use its core: half the time, half the work
    nanoseconds = (nanoseconds + static_cast<double>(busy) / (cores_per_rank * transport_.ranks)) / 2;
  }
  return nanoseconds * 1e-3;
}

// By candidate; empty if there are too few times of one.
std::vector<double> Tuner::times_of(const SizeClass& size_class, bool shared_tensors) const {
  const std::size_t candidates = size_class.candidates.size();
  const bool message = size_class.variants.offers;
  std::vector<double> result;
  for (std::size_t candidate = 0; candidate < candidates; ++candidate) {
    std::vector<double> values;
    for (std::size_t trial = candidate; trial < size_class.trials.size(); trial += candidates) {
      const auto value = microseconds_of(message, size_class.trials[trial], shared_tensors);
      if (value) values.push_back(*value);
    }
    if (values.size() < kLeastRounds) return {};
    result.push_back(typical(values, message));
  }
  return result;
}

// Rank 0: publishes the best candidate. Operations on shared tensors take other times than those on ordinary ones, for
// which the choice matters more.
void Tuner::decide(SizeClass& size_class) {
  std::vector<double> times = times_of(size_class, false);
  if (times.empty()) times = times_of(size_class, true);
  const std::vector<Variant>& candidates = size_class.candidates;
  auto best = static_cast<std::size_t>(std::find(candidates.begin(), candidates.end(), size_class.report.variant) -
                                       candidates.begin());
  if (!times.empty()) {
    const auto fastest = static_cast<std::size_t>(std::min_element(times.begin(), times.end()) - times.begin());
    if (times[fastest] < kBetter * times[best]) best = fastest;
    const std::lock_guard<std::mutex> lock(mutex_);
    size_class.report.microseconds = times[best];
  }
  // One word is enough: rank 0 decides a stage when all ranks have ended it, so they have adopted the decision before.
  const std::uint64_t decision = (size_class.stages + 1) * kCandidates + best;
  transport_.own().board->decisions[size_class.index].store(decision, std::memory_order_release);
  transport_.wake_peers();
}

// Adopts rank 0's decision; false if it has not been published yet.
bool Tuner::adopt(SizeClass& size_class) {
  const std::uint64_t decision = transport_.peer(0).board->decisions[size_class.index].load(std::memory_order_acquire);
  if (decision / kCandidates != size_class.stages + 1) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  ++size_class.stages;
  size_class.report.trials += size_class.length;
  size_class.report.variant = size_class.candidates[decision % kCandidates];
  begin_stage(size_class, size_class.count + 1);
  return true;
}

std::vector<SizeClassReport> Tuner::reports() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<SizeClassReport> result(classes_.size());
  for (const auto& [key, size_class] : classes_) result[size_class.index] = size_class.report;
  return result;
}

}  // namespace dtcomm
