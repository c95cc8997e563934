// A simulated world: n ranks in one thread. The real interpreters are stepped in a seeded order over regions on the
// heap, with delays, crashes and flipped bits. A failing seed reproduces.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/interpreter.h"
#include "engine/tuner.h"

namespace dtcomm {

struct SimulationOptions {
  int ranks = 1;
  std::uint64_t seed = 0;
  std::uint32_t max_boxes = 1;
  std::size_t slot_bytes = 64 * 1024;
  double delay = 0.5;             // probability that a rank does not yet see the next thing that a peer published
  int crash_rank = -1;            // a rank that ends ...
  std::uint64_t crash_after = 0;  // ... after it was stepped this often
  std::int64_t flip_box = -1;     // index (over all ranks) of the published box in which a bit is flipped
};

// How a rank ended. The numbers are part of the Python binding.
enum class OutcomeKind : std::uint8_t { done = 0, died = 1, peer_lost = 2, mismatch = 3, deadlock = 4, corrupt = 5 };

struct SimulationOutcome {
  OutcomeKind kind = OutcomeKind::done;
  int failed_rank = -1;        // peer_lost: the rank waited for; corrupt: the rank whose payload was damaged
  std::uint64_t finished = 0;  // operations
  std::uint64_t wire_bytes = 0;
  std::vector<SizeClassReport> choices;  // of its tuner, whose clock counts the steps of the world
};

class SimulatedWorld {
 public:
  explicit SimulatedWorld(const SimulationOptions& options);
  ~SimulatedWorld();

  // calls[rank] are that rank's operations in order. Ranks run ahead of each other as far as the engine allows.
  std::vector<SimulationOutcome> run(std::vector<std::vector<Call>> calls);
  std::uint64_t steps() const { return steps_; }

 private:
  class Rank;
  std::uint64_t random();
  void deliver(bool everything);
  void step(Rank& rank);
  void resolve_deadlock(const std::vector<Rank*>& blocked);

  SimulationOptions options_;
  std::uint64_t random_state_;
  std::uint64_t steps_ = 0;
  std::int64_t published_boxes_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace dtcomm
