// Chooses how operations are carried out by trying it: which stores write payloads and results, how large the pieces
// are, which of two programs with the same results runs, whether receivers copy out of the sender's memory, whether
// ranks use one thread or several. Results do not depend on it.
//
// Operations of the same kind and about the same size form a size class. All ranks run the same operations in the same
// order, so each rank counts those of a class for itself and all count alike. The first operations of a class are
// spent on stages, one for each property that has several values:
//
//   stage      Each candidate runs `repeats` operations in a row, so that the caches hold what they hold while it is in
//              use. Every rank writes the times of the last of them onto its board. The candidates take turns.
//   + kDecide  So many operations later rank 0 reads the boards of all ranks and publishes the best candidate.
//   + kAdopt   So many operations after the stage all ranks use it, and the next stage begins. A rank that gets here
//              before rank 0 has published waits.
//
// After the last stage the class is settled: its variant stays, and an operation costs one comparison. With `always`
// the search begins again after kRest operations, for machines whose cores move.
//
// The time of an operation is that from the last rank's start to the last rank's end, so a rank that comes late does
// not count. Messages in both directions share the cores: what one direction loses to the other is only seen in the
// time from the start of one message to the start of the next, so that is what counts for them. Where ranks take turns
// on the cores, their working time counts as well.
#pragma once

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
  double microseconds = 0;   // of an operation, as measured by rank 0; 0: not yet, or another rank's
  std::uint64_t trials = 0;  // operations of all stages
  bool settled = false;      // every property has been tried
};

class Tuner {
 public:
  explicit Tuner(Transport& transport) : transport_(transport) {}
  Tuner(const Tuner&) = delete;

  double cores_per_rank = 1;  // less than 1 where ranks take turns
  bool always = false;        // search again and again; equal on all ranks

  // How the operation that starts now is carried out. `trial` is the number of a trial, whose times are to be recorded;
  // `tries`: the operation belongs to a stage.
  struct Choice {
    Variant variant;
    bool tries = false;
    std::optional<std::uint64_t> trial;
  };
  // Nothing if rank 0 has not published its decision yet; the call is then to be repeated.
  std::optional<Choice> start(const Variants& variants, std::uint64_t operation);
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
  struct SizeClass {
    std::size_t index = 0;  // of its decision
    Variants variants;
    SizeClassReport report;    // report.variant is the one in use
    std::uint64_t count = 0;   // of its operations
    std::uint64_t stages = 0;  // that have ended
    int property = 0;          // of the next stage
    std::uint64_t begin = 0;   // of the stage, in operations of this class
    std::uint64_t length = 0;  // of the stage, in operations
    std::vector<Variant> candidates;
    std::vector<Trial> trials;  // of the stage, the candidates in turn
  };

  SizeClass* find(const Variants& variants);  // null if there are too many
  void begin_stage(SizeClass& size_class, std::uint64_t begin);
  void decide(SizeClass& size_class);
  bool adopt(SizeClass& size_class);
  std::vector<double> times_of(const SizeClass& size_class, bool shared_tensors) const;
  std::optional<double> microseconds_of(bool message, const Trial& trial, bool shared_tensor) const;

  Transport& transport_;
  std::unordered_map<std::uint64_t, SizeClass> classes_;  // by key
  std::uint64_t next_trial_ = 0;
  mutable std::mutex mutex_;  // held while classes are added and their reports are changed or read
};

}  // namespace dtcomm
