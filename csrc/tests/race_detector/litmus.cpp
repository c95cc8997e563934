// Litmus tests of the detector: what orders memory and what does not, between the lanes of two ranks of one block each
// (of one rank, for the device's scope). The result must be the same in every order in which the lanes run.
#include <cstdio>
#include <functional>

#include "cuda/fused/pipeline.cuh"
#include "emulator/block.h"
#include "tests/race_detector/tests.h"

namespace dtcomm::race_detector {

namespace {

using cuda::BarrierId;
using cuda::Quad;
using emulator::EmulatedBlock;
using emulator::Fault;
using emulator::Scheduler;

constexpr unsigned kOrders = 24, kBlocks = 3;
constexpr std::uint64_t kBudget = 1;

// What the lanes share. Plain memory, and words for signals.
struct alignas(16) Memory {
  std::uint32_t x = 0, y = 0;
  std::uint8_t byte[8] = {};
  Quad quad = {};
  std::uint64_t big[32] = {};
  std::uint32_t flag[4] = {};
};

struct Lane {
  const EmulatedBlock& block;
  unsigned rank;  // its block's number
  unsigned at;

  bool is(unsigned whose, unsigned lane) const { return rank == whose && at == lane; }
  void signal(std::uint32_t& flag, std::uint32_t value) const { block.signal(&flag, value); }
  void wait(const std::uint32_t& flag, std::uint32_t value) const { block.wait(&flag, value, kBudget); }
};

using Body = void (*)(const Lane& lane, Memory& memory);

struct Litmus {
  const char* what;
  bool races;
  Body body;
  Fault fault = {};
  bool one_rank = false;  // the blocks are of one rank
  Body then = nullptr;    // in another launch
  bool pushed = false;    // only rank 0 may load the memory
};

Fault without(bool Fault::* what) {
  Fault fault;
  fault.*what = false;
  return fault;
}

Fault scoped(Scope scope) {
  Fault fault;
  fault.scope = scope;
  return fault;
}

void pass_message(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) {
    memory.x = 1;
    lane.signal(memory.flag[0], 1);
  } else if (lane.is(1, 0)) {
    lane.wait(memory.flag[0], 1);
    memory.y = memory.x;
  }
}

void push_message(const Lane& lane, Memory& memory) {
  if (lane.is(1, 0)) {
    memory.x = 1;
    lane.signal(memory.flag[0], 1);
  } else if (lane.is(0, 0)) {
    lane.wait(memory.flag[0], 1);
    memory.y = memory.x;
  }
}

void pull_message(const Lane& lane, Memory& memory) {
  if (lane.is(1, 0)) {
    const std::uint32_t seen = memory.x;  // into the lane's own stack
    asm volatile("" ::"r"(seen));
  }
}

void poll_signal(const Lane& lane, Memory& memory) {
  if (lane.is(1, 0)) lane.block.load_acquire(&memory.flag[0]);
}

// Other lanes than those that signal access the memory.
template <bool Before, bool After>
void pass_for_block(const Lane& lane, Memory& memory) {
  if (lane.is(0, 45)) memory.x = 1;
  if (Before) lane.block.sync_block(BarrierId::payloads_stored);
  if (lane.is(0, 0)) lane.signal(memory.flag[0], 1);
  if (lane.is(1, 0)) lane.wait(memory.flag[0], 1);
  if (After) lane.block.sync_block(BarrierId::payloads_arrived);
  if (lane.is(1, 37)) memory.y = memory.x;
}

void pass_through_third_rank(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) {
    memory.x = 1;
    lane.signal(memory.flag[0], 1);
  } else if (lane.is(1, 0)) {
    lane.wait(memory.flag[0], 1);
    lane.signal(memory.flag[1], 1);
  } else if (lane.is(2, 0)) {
    lane.wait(memory.flag[1], 1);
    memory.y = memory.x;
  }
}

// A wait for the first signal does not order what precedes the second one.
template <std::uint32_t Waited>
void run_ahead(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) {
    lane.signal(memory.flag[0], 1);
    memory.x = 1;
    lane.signal(memory.flag[0], 2);
  } else if (lane.is(1, 0)) {
    lane.wait(memory.flag[0], Waited);
    memory.y = memory.x;
  }
}

template <bool Waits>
void write_after_read(const Lane& lane, Memory& memory) {
  if (lane.is(1, 0)) {
    memory.y = memory.x;
    lane.signal(memory.flag[0], 1);
  } else if (lane.is(0, 0)) {
    if (Waits) lane.wait(memory.flag[0], 1);
    memory.x = 1;
  }
}

enum class Sync { exchange, warp, block };

// From lane 0 to `Reader` of the same block.
template <Sync Kind, unsigned Reader>
void pass_within_block(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) memory.x = 1;
  if (Kind == Sync::exchange) lane.block.shuffle_xor(lane.at, 1);
  if (Kind == Sync::warp) lane.block.sync_warp();
  if (Kind == Sync::block) lane.block.sync_block(BarrierId::pointers_set);
  if (lane.is(0, Reader)) memory.y = memory.x;
}

void store_same_value(const Lane& lane, Memory& memory) {
  if (lane.at == 0) memory.x = 1;
}

void store_same_value_strongly(const Lane& lane, Memory& memory) {
  if (lane.at == 0) lane.block.store_relaxed(&memory.x, 1);
}

template <bool Strong>
void load_strong_store(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) lane.block.store_relaxed(&memory.x, 1);
  if (lane.is(1, 0)) memory.y = Strong ? lane.block.load_acquire(&memory.x) : memory.x;
}

void store_neighbours(const Lane& lane, Memory& memory) {
  if (lane.rank == 0 && lane.at < 8) memory.byte[lane.at] = 1;
}

void store_overlapping(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) cuda::store_bytes<4>(0, memory.byte);
  if (lane.is(0, 1)) memory.byte[3] = 1;
}

void move_quads(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) cuda::store_quad(Quad{{1, 2, 3, 4}}, &memory.quad);
  if (lane.is(0, 1)) memory.y = cuda::load_quad(&memory.quad).word[0];
}

void copy_structures(const Lane& lane, Memory& memory) {
  struct Large {
    std::uint64_t word[32];
  };
  Large own = {};
  if (lane.is(0, 0)) *reinterpret_cast<Large*>(memory.big) = own;
  if (lane.is(0, 1))
    own = *reinterpret_cast<const Large*>(memory.big), memory.y = static_cast<std::uint32_t>(own.word[31]);
}

void store_x(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) memory.x = 1;
}

template <unsigned Reader>
void load_x(const Lane& lane, Memory& memory) {
  if (lane.is(Reader, 50)) memory.y = memory.x;
}

volatile std::uint32_t unregistered;  // so that the store is made

void store_outside(const Lane& lane, Memory&) {
  if (lane.is(0, 0)) unregistered = 1;
}

void store_to_constant(const Lane& lane, Memory&) {
  if (lane.is(0, 0)) const_cast<Fault&>(lane.block.fault).barrier = 7;
}

const Litmus kLitmus[] = {
    {"a message", false, pass_message},
    {"a message without a release", true, pass_message, without(&Fault::releases)},
    {"a message without an acquire", true, pass_message, without(&Fault::acquires)},
    {"a message without a wait", true, pass_message, without(&Fault::waits)},
    {"a message between ranks with the device's scope", true, pass_message, scoped(Scope::device)},
    {"a message between blocks with the device's scope", false, pass_message, scoped(Scope::device), true},
    {"a message between blocks with a block's scope", true, pass_message, scoped(Scope::block), true},
    {"a message of a block", false, pass_for_block<true, true>},
    {"a message of a block without a barrier before", true, pass_for_block<false, true>},
    {"a message to a block without a barrier after", true, pass_for_block<true, false>},
    {"a message through a third rank", false, pass_through_third_rank},
    {"a wait for an earlier signal", true, run_ahead<1>},
    {"a wait for the signal after the store", false, run_ahead<2>},
    {"a write after a read", false, write_after_read<true>},
    {"a write beside a read", true, write_after_read<false>},
    {"an exchange within a warp", true, pass_within_block<Sync::exchange, 1>},
    {"a warp barrier", false, pass_within_block<Sync::warp, 31>},
    {"a warp barrier, to another warp", true, pass_within_block<Sync::warp, 32>},
    {"a block barrier", false, pass_within_block<Sync::block, 63>},
    {"the same value twice", true, store_same_value},
    {"the same value twice by strong stores", false, store_same_value_strongly},
    {"a strong load of a strong store", false, load_strong_store<true>},
    {"a weak load of a strong store", true, load_strong_store<false>},
    {"bytes beside each other", false, store_neighbours},
    {"a byte of a word", true, store_overlapping},
    {"sixteen bytes", true, move_quads},
    {"a structure", true, copy_structures},
    {"a launch after another", false, store_x, {}, false, load_x<0>},
    {"a launch beside another", true, store_x, without(&Fault::streams), false, load_x<0>},
    {"a launch after another of another rank", true, store_x, {}, false, load_x<1>},
    {"memory that is not registered", true, store_outside},
    {"constant memory", true, store_to_constant},
    {"a message pushed to a peer", false, push_message, {}, false, nullptr, true},
    {"a load of a peer's memory", true, pull_message, {}, false, nullptr, true},
    {"a strong load of a peer's memory", true, poll_signal, {}, false, nullptr, true},
};

bool run(Detector& detector, Scheduler& scheduler, const Litmus& litmus, unsigned order) {
  Memory memory;
  const Fault fault = litmus.fault;
  std::vector<cuda::Shared> shared(kBlocks);
  detector.begin({kBlocks * emulator::kBlockThreads, emulator::kBlockThreads, litmus.one_rank ? kBlocks : 1});
  if (litmus.pushed) {
    detector.pushed(&memory, sizeof memory, "memory", 0);
  } else {
    detector.shared(&memory, sizeof memory, "memory", 0);
  }
  detector.constant(&fault, sizeof fault);
  scheduler.observe(&detector);
  const Status status = scheduler.run(kBlocks, emulator::kBlockThreads, order, [&](unsigned at) {
    const EmulatedBlock block(scheduler, shared[at], fault);
    const Lane lane{block, at, block.thread()};
    Memory& own_memory = memory;
    for (const Body body : {litmus.body, litmus.then}) {
      if (!body) continue;
      if (body == litmus.then) scheduler.sync_stream(at, 1, fault.streams);
      const Scheduler::LaneScope scope(scheduler);
      body(lane, own_memory);
    }
  });
  detector.end();
  const std::vector<Race> races_found = detector.take();
  const bool races = !races_found.empty();
  if (status.ok() && races == litmus.races) return true;
  std::printf("FAILED: %s: %s in order %u\n", litmus.what,
              !status.ok() ? status.message().c_str()
              : races      ? "races"
                           : "does not race",
              order);
  if (races) std::printf("  %s\n", detector.describe(races_found[0]).c_str());
  return false;
}

}  // namespace

bool litmus_tests() {
  Detector detector;
  Scheduler scheduler(kBlocks * emulator::kBlockThreads);
  bool all = true;
  for (const Litmus& litmus : kLitmus) {
    for (unsigned order = 0; order < kOrders && all; ++order) all = run(detector, scheduler, litmus, order);
  }
  if (all) std::printf("%zu litmus tests in %u orders: the expected races\n", std::size(kLitmus), kOrders);
  return all;
}

}  // namespace dtcomm::race_detector
