// n ranks in one thread: the real machines, stepped in a seeded order over areas on the heap, with delays, deaths
// and flipped bits. A seed is a reproducer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/interpreter.h"

namespace dtcomm {

struct LocalOptions {
  int ranks = 1;
  std::uint64_t seed = 0;
  std::uint32_t max_boxes = 1;
  std::size_t slot_bytes = 64 * 1024;
  double delay = 0.5;       // chance that a rank does not yet see the next thing a peer published
  int victim = -1;          // rank that dies ...
  std::uint64_t death = 0;  // ... after this many looks
  std::int64_t flip = -1;   // index (over all ranks) of the published box in which a bit is flipped
};

enum class Fate : std::uint8_t { done = 0, died = 1, peer_lost = 2, mismatch = 3, stuck = 4, corrupt = 5 };

struct LocalOutcome {
  Fate fate = Fate::done;
  int culprit = -1;            // peer_lost: the rank waited for; corrupt: the rank whose payload was damaged
  std::uint64_t finished = 0;  // operations
  std::uint64_t wire_bytes = 0;
};

class LocalWorld {
 public:
  explicit LocalWorld(const LocalOptions& options);
  ~LocalWorld();

  // calls[rank] are that rank's operations in order; ranks run ahead of each other as the engine lets them.
  std::vector<LocalOutcome> run(std::vector<std::vector<Call>> calls);
  std::uint64_t looks() const { return looks_; }

 private:
  class Rank;
  std::uint64_t random();
  void deliver(bool everything);

  LocalOptions options_;
  std::uint64_t state_;
  std::uint64_t looks_ = 0;
  std::int64_t published_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace dtcomm
