// Chooses how operations are carried out by trying it: which stores write payloads and results, how large the pieces
// are, which of two programs with the same results runs, whether receivers copy out of the sender's memory, whether
// ranks use one thread or several. Results do not depend on it.
//
// Operations of the same kind and about the same size form a size class. All ranks run the same operations in the same
// order, so they count those of a class alike. Trials take place in stages. A stage tries the values of one property,
// in turn and several times, from the operation `begin` of its class on. Each time some operations in a row use the
// value, until the caches hold what they hold while it is in use, and every rank writes down when it started and ended
// the last of them.
// Some operations later, rank 0 reads these times, decides, and publishes the decision in its region: the variant, and
// when the next stage begins. What is better than the variant in use is compared with it once more before it replaces
// it. From an operation of the class on that all ranks know, they use it; a rank that gets there first waits for the
// decision.
//
// The time of an operation is that from the last rank's start to the last rank's end, so that a rank that comes late
// does not count. That of a message is the mean time from the start of one to the start of the next, unless that is
// much longer: where messages in both directions take turns, two copies keep sender and receiver busy at once and one
// does not, so the message's own time says nothing of what the other direction loses. Where ranks take turns on the
// cores, it counts as well how long they work on the operation.
//
// The gaps between stages double with every round of the properties, until so many operations pass that what the next
// stage's trials will cost is at most kMaxCost of their time. Between two stages there are checks, stages in which only
// the variant in use is timed: if it has become slower than another one was, because the machine has changed (virtual
// cores move), these two are compared at once.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/plan.h"
#include "engine/transport.h"

namespace dtcomm {

// What is known about a size class, for reports.
struct SizeClassReport {
  std::string name;
  Variant variant;
  double microseconds = 0;  // of an operation, as measured by rank 0; 0: not yet, or another rank's
  std::uint64_t trials = 0;
  bool settled = false;  // every property has been tried
};

class Tuner {
 public:
  explicit Tuner(Transport& transport) : transport_(transport) {}
  Tuner(const Tuner&) = delete;

  double cores_per_rank = 1;  // less than 1 where ranks take turns

  // What the operation that starts now uses: a variant of its plan. `trial` is the number of a trial, whose times are
  // to be recorded; `tries`: the variant is one that a stage tries.
  struct Choice {
    unsigned variant = 0;
    bool tries = false;
    std::optional<std::uint64_t> trial;
  };
  // Nothing if rank 0 has not published its decision yet; the call is then to be repeated.
  std::optional<Choice> start(const VariantSpace& space, std::uint64_t operation);
  struct OperationTimes {
    std::uint64_t trial, operation;
    std::uint64_t begin_ns, end_ns;
    std::uint64_t busy_ns;            // in which this rank worked on it and did not wait
    std::uint64_t previous_begin_ns;  // see TrialTimes
  };
  // Writes down the times of a trial, and whether this rank's input lies in memory that peers can map.
  void record(const OperationTimes& times, bool shared_tensor);

  std::vector<SizeClassReport> reports() const;

 private:
  struct Trial {
    std::uint64_t number;
    std::uint64_t operation;
  };
  // What rank 0 needs to know in order to decide.
  struct Schedule {
    std::array<float, 256> average_us{};  // by variant; 0: not known
    std::uint64_t next_stage = 0;         // in which other variants are tried: the operation of this class
    std::uint64_t operations = 0;         // of the stages since the last gap
    double cost = 0;                      // of these stages, in operations
    bool checked = false;                 // a check has named a challenger
    std::uint64_t keep_until = 0;         // no check names a challenger before this operation of this class
    std::uint64_t patience = 2;           // grows while challengers that checks name do not win
    int stages_for_ordinary = 0;          // in which operations on shared tensors decide nothing
  };
  struct SizeClass {
    std::size_t index = 0;  // of its decisions
    VariantSpace space;
    unsigned variant = 0;        // in use
    std::uint64_t count = 0;     // of its operations
    std::uint64_t stage = 0;     // all stages so far
    std::size_t properties = 0;  // that have had their stage, in turn
    bool confirms = false;       // the stage compares the variant in use with its challenger once more
    bool settled = false;
    std::uint64_t begin = 0;  // of the stage, in operations of this class
    // Of the stage, in the order of their numbers: messages in both directions, whose classes two tuners try, then use
    // the same ones at the same time.
    std::vector<unsigned> candidates;
    std::vector<Trial> trials;     // of the stage
    std::uint64_t all_trials = 0;  // operations of all stages
    double microseconds = 0;
    Schedule schedule;  // of rank 0
  };

  SizeClass* find(const VariantSpace& space);  // null if there are too many
  static std::uint64_t operations_of_stage(const SizeClass& size_class);
  void decide(SizeClass& size_class);
  static std::uint64_t plan_gap(SizeClass& size_class, const std::vector<double>& times);
  void publish(const SizeClass& size_class, unsigned variant, unsigned challenger, std::uint64_t begin, bool check);
  bool adopt(SizeClass& size_class);
  static void begin_stage(SizeClass& size_class, std::uint64_t begin);
  std::vector<double> times_of(SizeClass& size_class) const;
  std::vector<double> times_of(const SizeClass& size_class, bool shared_tensors) const;
  std::optional<double> microseconds_of(bool message, const Trial& trial, bool shared_tensor) const;

  Transport& transport_;
  std::unordered_map<std::uint64_t, SizeClass> classes_;  // by key
  std::uint64_t next_trial_ = 0;
  mutable std::mutex mutex_;  // held while classes are added, changed or reported
};

}  // namespace dtcomm
