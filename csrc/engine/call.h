// A call: one operation with its tensors, as the interpreter runs it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "engine/plan.h"
#include "engine/shm_layout.h"

namespace dtcomm {

// The tensors of one segment. The interpreter only reads `in`, but peers write into it where a zero-copy operation
// works in place.
struct TensorPointers {
  std::uint8_t* in = nullptr;   // null if this rank has no input
  std::uint8_t* out = nullptr;  // null if this rank has no output
  float* residual = nullptr;    // null if errors are not fed back
};

// Work of one rank that runs before or behind its operation, in the order of the operations.
using LocalTask = std::function<void(const Kernels&)>;

// An epilogue that runs on parts of the only output as soon as they are final.
struct EpilogueHook {
  std::function<void(const Kernels&, std::size_t first, std::size_t numel)> apply;  // called once for each element
  std::vector<std::pair<const void*, std::size_t>> memory;                          // that it touches besides, in bytes
};

struct Call {
  std::shared_ptr<const Plan> plan;
  std::vector<TensorPointers> tensors;  // by segment
  std::uint64_t seed = 0;
  const Kernels* kernels = nullptr;
  std::vector<LocalTask> before, after;
  EpilogueHook epilogue;
  std::uint64_t agreed = 0;  // a number that has to be equal on all ranks, in addition to the plan
  // Where the only input lies in memory that peers can map: a SharedTensorLocation; slot -1 if it does not.
  std::int64_t tensor_slot = -1;
  std::uint64_t tensor_id = 0;
  std::uint64_t tensor_offset = 0;
  // The address of the only input if peers may read it in this process's private memory; 0 otherwise.
  std::uint64_t address = 0;
};

// Announces to the peers what this rank is about to do. Returns the operation's fingerprint.
std::uint64_t announce(RegionHeader& own, const Call& call, std::uint64_t number);

// Whether two calls, in this order, touch no byte in common. False if tasks run between them, because tasks may touch
// any memory.
bool touch_disjoint_memory(const Call& first, const Call& second);

}  // namespace dtcomm
