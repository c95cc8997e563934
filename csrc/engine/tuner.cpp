#include "engine/tuner.h"

#include <algorithm>
#include <cmath>

namespace dtcomm {
namespace {

constexpr std::uint64_t kFirstStage = 2;  // the first operations of a class touch memory for the first time
constexpr std::size_t kLeastTimes = 3;    // of a candidate, without which nothing is decided

// How many operations behind the last trial rank 0 decides, when all ranks have ended the trials, and all adopt the
// decision, which has usually been published then. No rank is more than kSlots pieces ahead of another one.
struct Delays {
  std::uint64_t decide, adopt;
};
constexpr Delays delays_of(const VariantSpace& space) {
  return space.large ? Delays{2, 4} : Delays{kSlots + 2, 3 * kSlots};
}

constexpr double kBetter = 0.97;    // of the time in use: what takes less replaces it
constexpr double kMaxCost = 0.005;  // of the time of a class's operations that trials may cost
// From the first round of the properties to the second: at least so long, and so many times the operations of a stage.
constexpr double kFirstGapUs = 20e3;
constexpr std::uint64_t kFirstGap = 8;
constexpr std::uint64_t kLeastGap = 20;  // operations between stages, times those of a stage

constexpr std::uint64_t kChecksUs = 2000;  // of operations, at least, between two checks
constexpr std::uint64_t kLeastCheck = 8;   // operations between two checks
// A check may lead to trials so many times the operations of a stage after the last one; more if it was in vain.
constexpr std::uint64_t kLeastPatience = 2, kMostPatience = 64;
constexpr int kStagesForOrdinary = 8;  // in which no ordinary tensor was seen before shared ones decide
// Of how long an operation takes, beside the work, where ranks take turns on the cores.
constexpr double kWeightOfTime = 0.5;
// The time from the start of one message to the start of the next counts up to so many times the message's own:
// messages in both directions take up to twice as long, and what is longer is not due to them.
constexpr std::uint64_t kMostOfMessage = 3;
constexpr float kWeightOfStage = 0.5f, kWeightOfCheck = 0.25f;  // in the average time of a variant

// A decision in a word: the mark of the stage that it ends, the challenger and the variant in use, which are the same
// if there is no challenger, whether the next stage is a check, and the operation of the class in which it begins.
constexpr int kMarkShift = 56, kChallengerShift = 48, kVariantShift = 40;
constexpr std::uint64_t kCheckBit = std::uint64_t{1} << 39;
constexpr std::uint64_t kBeginMask = kCheckBit - 1;
constexpr std::uint64_t mark_of(std::uint64_t stage) { return stage % 0xff + 1; }

// What takes longer than usual, because something else runs, is above the lower quartile. Messages are started one
// after the other, so a disturbance makes one appear to take longer and the next shorter; of them it is the median.
double typical(std::vector<double>& values, bool messages) {
  const auto place = values.begin() + static_cast<std::ptrdiff_t>(values.size() / (messages ? 2 : 4));
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

// The properties of which a stage tries all values together: the bits of a variant, or the piece size.
constexpr unsigned kProperties[] = {
    VariantSpace::kSingleCopy, VariantSpace::kParallel,
    VariantSpace::kAlternative | VariantSpace::kStreamPayload | VariantSpace::kStreamOutput, 0};

std::vector<unsigned> candidates_of(const VariantSpace& space, unsigned variant, unsigned property) {
  std::vector<unsigned> candidates{variant};
  unsigned bits = property & space.tried;
  if (property == 0) {
    for (unsigned size = 0; size < space.piece_bytes.size(); ++size) {
      const unsigned other = (variant & ((1u << VariantSpace::kPieceShift) - 1)) | size << VariantSpace::kPieceShift;
      if (other != variant) candidates.push_back(other);
    }
    return candidates;
  }
  if (variant & VariantSpace::kSingleCopy) bits &= ~VariantSpace::kStreamPayload;  // there are no payloads
  for (unsigned set = bits; set != 0; set = (set - 1) & bits) candidates.push_back(variant ^ set);
  return candidates;
}

}  // namespace

Tuner::SizeClass* Tuner::find(const VariantSpace& space) {
  if (const auto found = classes_.find(space.key()); found != classes_.end()) return &found->second;
  if (classes_.size() == kSizeClasses) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  SizeClass size_class;
  size_class.index = classes_.size();
  size_class.space = space;
  size_class.variant = space.initial;
  SizeClass& added = classes_.emplace(space.key(), std::move(size_class)).first->second;
  begin_stage(added, kFirstStage);
  return &added;
}

// A check has one candidate, which is in use anyway.
std::uint64_t Tuner::operations_of_stage(const SizeClass& size_class) {
  const std::uint64_t candidates = size_class.candidates.size();
  return candidates * size_class.space.rounds * (candidates > 1 ? size_class.space.repeats : 1);
}

// Begins the stage of the next property of which there is something to try.
void Tuner::begin_stage(SizeClass& size_class, std::uint64_t begin) {
  const std::size_t first = size_class.properties;
  do {
    const unsigned property = kProperties[size_class.properties++ % std::size(kProperties)];
    size_class.candidates = candidates_of(size_class.space, size_class.variant, property);
    std::sort(size_class.candidates.begin(), size_class.candidates.end());
  } while (size_class.candidates.size() < 2 && size_class.properties < first + std::size(kProperties));
  const bool nothing_to_try = size_class.candidates.size() < 2;
  size_class.begin = nothing_to_try ? UINT64_MAX : begin;
  size_class.settled |= nothing_to_try;
  size_class.trials.clear();
}

std::optional<Tuner::Choice> Tuner::start(const VariantSpace& space, std::uint64_t operation) {
  SizeClass* const found = find(space);
  if (!found) return Choice{space.initial, false, std::nullopt};
  SizeClass& size_class = *found;
  if (size_class.count >= size_class.begin) {
    const std::uint64_t since = size_class.count - size_class.begin;
    const Delays delays = delays_of(space);
    const std::uint64_t operations = operations_of_stage(size_class);
    if (since < operations) {
      ++size_class.count;
      const std::uint64_t candidates = size_class.candidates.size();
      if (candidates == 1) {
        size_class.trials.push_back({next_trial_, operation});
        return Choice{size_class.variant, true, next_trial_++};
      }
      ++size_class.all_trials;
      Choice choice{size_class.candidates[since / space.repeats % candidates], true, std::nullopt};
      if (since % space.repeats == space.repeats - 1) {
        size_class.trials.push_back({next_trial_, operation});
        choice.trial = next_trial_++;
      }
      return choice;
    }
    if (since == operations + delays.decide && transport_.rank == 0) decide(size_class);
    if (since == operations + delays.adopt && !adopt(size_class)) return std::nullopt;
  }
  ++size_class.count;
  return Choice{size_class.variant, false, std::nullopt};
}

void Tuner::record(const OperationTimes& times, bool shared_tensor) {
  TrialTimes& own = transport_.own().header->trials[times.trial % kTrials];
  own.operation.store(0, std::memory_order_release);
  own.begin_ns.store(times.begin_ns, std::memory_order_release);
  own.end_ns.store(times.end_ns, std::memory_order_release);
  own.previous_begin_ns.store(times.previous_begin_ns, std::memory_order_release);
  own.busy_ns.store(times.busy_ns, std::memory_order_release);
  own.shared_tensor.store(shared_tensor, std::memory_order_release);
  own.operation.store(times.operation, std::memory_order_release);
}

// Nothing if rank 0's tensor was of the other kind, or a rank's times are missing: another trial has taken their place,
// or the rank has not ended the operation.
std::optional<double> Tuner::microseconds_of(bool message, const Trial& trial, bool shared_tensor) const {
  const TrialTimes& own = transport_.own().header->trials[trial.number % kTrials];
  if (own.shared_tensor.load(std::memory_order_acquire) != shared_tensor) return std::nullopt;
  std::uint64_t last_begin = 0, last_end = 0, previous_begin = 0, busy = 0, most_busy = 0;
  for (const PeerView& peer : transport_.peers) {
    const TrialTimes& times = peer.header->trials[trial.number % kTrials];
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
  double result = static_cast<double>(time);
  if (cores_per_rank < 1) {
    const double work = static_cast<double>(busy) / (cores_per_rank * transport_.ranks);
    result = kWeightOfTime * result + (1 - kWeightOfTime) * work;
  }
  return result * 1e-3;
}

// Operations on ordinary and on shared tensors take different times. Decisions are about the ordinary ones, for which
// they matter more, if there have been any lately.
std::vector<double> Tuner::times_of(SizeClass& size_class) const {
  Schedule& schedule = size_class.schedule;
  std::vector<double> times = times_of(size_class, false);
  if (!times.empty()) {
    schedule.stages_for_ordinary = kStagesForOrdinary;
  } else if (schedule.stages_for_ordinary == 0) {
    times = times_of(size_class, true);
  } else if (--schedule.stages_for_ordinary == 0) {
    schedule.average_us.fill(0);
  }
  return times;
}

// By candidate; empty if there are too few times of one.
std::vector<double> Tuner::times_of(const SizeClass& size_class, bool shared_tensors) const {
  const std::size_t candidates = size_class.candidates.size();
  std::vector<double> result;
  for (std::size_t candidate = 0; candidate < candidates; ++candidate) {
    std::vector<double> values;
    for (std::size_t trial = candidate; trial < size_class.trials.size(); trial += candidates) {
      const auto value = microseconds_of(size_class.space.message, size_class.trials[trial], shared_tensors);
      if (value) values.push_back(*value);
    }
    if (values.size() < kLeastTimes) return {};
    result.push_back(typical(values, size_class.space.message));
  }
  return result;
}

// Rank 0: ends a stage. What takes less time than the variant in use becomes its challenger, and replaces it if it does
// once more. Times are averages of those of earlier stages, so that what is good at one moment and bad at another,
// where virtual cores move, does not win by chance.
void Tuner::decide(SizeClass& size_class) {
  Schedule& schedule = size_class.schedule;
  const bool checks = size_class.candidates.size() == 1;
  const std::uint64_t operations = operations_of_stage(size_class);
  const std::vector<double> times = times_of(size_class);
  const std::uint64_t next = size_class.begin + operations + delays_of(size_class.space).adopt + 1;
  for (std::size_t i = 0; i < times.size(); ++i) {
    float& average = schedule.average_us[size_class.candidates[i]];
    const float weight = average == 0 ? 1.0f : checks ? kWeightOfCheck : kWeightOfStage;
    average += weight * (static_cast<float>(times[i]) - average);
  }
  const auto takes_less = [&](unsigned one, unsigned other) {
    const float times_one = schedule.average_us[one], times_other = schedule.average_us[other];
    return times_one > 0 && times_one < kBetter * times_other;
  };
  unsigned variant = size_class.variant, challenger = variant;
  if (checks) {
    // Any variant that was tried may challenge the one in use, if that has become slow.
    if (next >= schedule.keep_until) {
      for (unsigned other = 0; other < schedule.average_us.size(); ++other) {
        if (takes_less(other, challenger)) challenger = other;
      }
    }
    schedule.checked = challenger != variant;
  } else if (!times.empty()) {
    for (const unsigned other : size_class.candidates) {
      if (takes_less(other, challenger)) challenger = other;
    }
    if (size_class.confirms) variant = challenger;
  }
  const float used = schedule.average_us[variant];
  if (used > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_class.microseconds = used;
  }
  if (challenger != variant) {
    if (!checks) plan_gap(size_class, times);
    publish(size_class, variant, challenger, next, false);  // the next stage compares these two
    return;
  }
  if (!checks && schedule.checked) {  // ends what a check began
    schedule.checked = false;
    const bool better = variant != size_class.variant;
    schedule.patience = better ? kLeastPatience : std::min(2 * schedule.patience, kMostPatience);
    schedule.keep_until = next + schedule.patience * kLeastGap * operations;
  } else if (!checks) {
    schedule.next_stage = next + plan_gap(size_class, times);
    schedule.operations = 0;
    schedule.cost = 0;
  }
  // The stage that is due begins, or a check if there is time for one before.
  const auto pause =
      std::max(kLeastCheck, static_cast<std::uint64_t>(static_cast<double>(kChecksUs) / std::max(used, 1.0f)));
  const std::uint64_t after_check = next + pause + size_class.space.rounds + (next - size_class.begin - operations);
  const bool check = after_check < schedule.next_stage;
  publish(size_class, variant, variant, check ? next + pause : std::max(next, schedule.next_stage), check);
}

// Adds a stage to those that follow each other without a gap; returns the gap behind it, in operations.
std::uint64_t Tuner::plan_gap(SizeClass& size_class, const std::vector<double>& times) {
  Schedule& schedule = size_class.schedule;
  schedule.operations += operations_of_stage(size_class);
  const std::uint64_t least = kLeastGap * schedule.operations;
  // The first decisions may be made while a program starts and the machine is busy with that, so they are looked at
  // again soon, then ever less often until the cost decides.
  const auto cycles = static_cast<int>(std::min<std::size_t>(size_class.properties / std::size(kProperties), 30));
  if (cycles == 0) return 0;
  if (times.empty()) return least;
  // What the same stage costs if it is repeated, in operations.
  const double used = *std::min_element(times.begin(), times.end());
  const auto each = static_cast<double>(operations_of_stage(size_class)) / static_cast<double>(times.size());
  for (const double time : times) schedule.cost += each * (time / used - 1);
  const double first = std::max(kFirstGapUs / used, static_cast<double>(kFirstGap * schedule.operations));
  const double most = std::max(static_cast<double>(least), schedule.cost / kMaxCost);
  return static_cast<std::uint64_t>(std::min({std::ldexp(first, cycles - 1), most, 1e9}));
}

void Tuner::publish(const SizeClass& size_class, unsigned variant, unsigned challenger, std::uint64_t begin,
                    bool check) {
  const std::uint64_t decision =
      mark_of(size_class.stage) << kMarkShift | std::uint64_t{challenger} << kChallengerShift |
      std::uint64_t{variant} << kVariantShift | (check ? kCheckBit : 0) | (begin & kBeginMask);
  std::atomic<std::uint64_t>* const decisions = transport_.own().header->decisions[size_class.index];
  decisions[size_class.stage % kDecisions].store(decision, std::memory_order_release);
  transport_.wake_peers();
}

// Adopts rank 0's decision; false if it has not been published yet.
bool Tuner::adopt(SizeClass& size_class) {
  const std::atomic<std::uint64_t>* const decisions = transport_.peer(0).header->decisions[size_class.index];
  const std::uint64_t decision = decisions[size_class.stage % kDecisions].load(std::memory_order_acquire);
  if (decision >> kMarkShift != mark_of(size_class.stage)) return false;
  const auto challenger = static_cast<unsigned>(decision >> kChallengerShift & 0xff);
  const std::lock_guard<std::mutex> lock(mutex_);
  size_class.variant = static_cast<unsigned>(decision >> kVariantShift & 0xff);
  ++size_class.stage;
  size_class.confirms = challenger != size_class.variant;
  if (!size_class.confirms) size_class.settled |= size_class.properties >= std::size(kProperties);
  if (size_class.confirms || (decision & kCheckBit)) {
    size_class.candidates = {size_class.variant};
    if (size_class.confirms) size_class.candidates.push_back(challenger);
    std::sort(size_class.candidates.begin(), size_class.candidates.end());
    size_class.begin = decision & kBeginMask;
    size_class.trials.clear();
  } else {
    begin_stage(size_class, decision & kBeginMask);
  }
  return true;
}

std::vector<SizeClassReport> Tuner::reports() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<SizeClassReport> result(classes_.size());
  for (const auto& [key, size_class] : classes_) {
    result[size_class.index] = {size_class.space.size_class, size_class.space.at(size_class.variant),
                                size_class.microseconds, size_class.all_trials, size_class.settled};
  }
  return result;
}

}  // namespace dtcomm
