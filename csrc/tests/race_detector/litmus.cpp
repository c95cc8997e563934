// What orders memory and what does not, by exchanges between the lanes of two ranks, of one block each (of one rank,
// for scopes of a device). An answer must be the same in every order in which the lanes run.
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
  void tell(std::uint32_t& flag, std::uint32_t value) const { block.signal(&flag, value); }
  void hear(const std::uint32_t& flag, std::uint32_t value) const { block.wait(&flag, value, kBudget); }
};

using Body = void (*)(const Lane& lane, Memory& memory);

struct Litmus {
  const char* what;
  bool races;
  Body body;
  Fault fault = {};
  bool one_rank = false;  // the blocks are of one rank
  Body then = nullptr;    // in another launch
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
    lane.tell(memory.flag[0], 1);
  } else if (lane.is(1, 0)) {
    lane.hear(memory.flag[0], 1);
    memory.y = memory.x;
  }
}

// By other lanes than those that signal.
template <bool Before, bool After>
void pass_for_all(const Lane& lane, Memory& memory) {
  if (lane.is(0, 45)) memory.x = 1;
  if (Before) lane.block.sync_block(BarrierId::payloads_stored);
  if (lane.is(0, 0)) lane.tell(memory.flag[0], 1);
  if (lane.is(1, 0)) lane.hear(memory.flag[0], 1);
  if (After) lane.block.sync_block(BarrierId::payloads_arrived);
  if (lane.is(1, 37)) memory.y = memory.x;
}

void pass_by_way_of_a_third(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) {
    memory.x = 1;
    lane.tell(memory.flag[0], 1);
  } else if (lane.is(1, 0)) {
    lane.hear(memory.flag[0], 1);
    lane.tell(memory.flag[1], 1);
  } else if (lane.is(2, 0)) {
    lane.hear(memory.flag[1], 1);
    memory.y = memory.x;
  }
}

// Whoever waits for the first signal has not been told of what came before the second.
template <std::uint32_t Waited>
void run_ahead(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) {
    lane.tell(memory.flag[0], 1);
    memory.x = 1;
    lane.tell(memory.flag[0], 2);
  } else if (lane.is(1, 0)) {
    lane.hear(memory.flag[0], Waited);
    memory.y = memory.x;
  }
}

template <bool Waits>
void write_after_read(const Lane& lane, Memory& memory) {
  if (lane.is(1, 0)) {
    memory.y = memory.x;
    lane.tell(memory.flag[0], 1);
  } else if (lane.is(0, 0)) {
    if (Waits) lane.hear(memory.flag[0], 1);
    memory.x = 1;
  }
}

enum class Meets { exchange, together, block };

// From lane 0 to `Reader` of the same block.
template <Meets How, unsigned Reader>
void pass_within_a_block(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) memory.x = 1;
  if (How == Meets::exchange) lane.block.shuffle_xor(lane.at, 1);
  if (How == Meets::together) lane.block.sync_warp();
  if (How == Meets::block) lane.block.sync_block(BarrierId::pointers_set);
  if (lane.is(0, Reader)) memory.y = memory.x;
}

void store_the_same(const Lane& lane, Memory& memory) {
  if (lane.at == 0) memory.x = 1;
}

void note_the_same(const Lane& lane, Memory& memory) {
  if (lane.at == 0) lane.block.store_relaxed(&memory.x, 1);
}

template <bool Strong>
void look_at_a_note(const Lane& lane, Memory& memory) {
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
  struct Big {
    std::uint64_t word[32];
  };
  Big own = {};
  if (lane.is(0, 0)) *reinterpret_cast<Big*>(memory.big) = own;
  if (lane.is(0, 1))
    own = *reinterpret_cast<const Big*>(memory.big), memory.y = static_cast<std::uint32_t>(own.word[31]);
}

void store_x(const Lane& lane, Memory& memory) {
  if (lane.is(0, 0)) memory.x = 1;
}

template <unsigned Reader>
void load_x(const Lane& lane, Memory& memory) {
  if (lane.is(Reader, 50)) memory.y = memory.x;
}

volatile std::uint32_t nobodys;  // so that the store is made

void store_elsewhere(const Lane& lane, Memory&) {
  if (lane.is(0, 0)) nobodys = 1;
}

void store_in_a_constant(const Lane& lane, Memory&) {
  if (lane.is(0, 0)) const_cast<Fault&>(lane.block.fault).barrier = 7;
}

const Litmus kLitmus[] = {
    {"a message", false, pass_message},
    {"a message without a release", true, pass_message, without(&Fault::releases)},
    {"a message without an acquire", true, pass_message, without(&Fault::acquires)},
    {"a message that nobody waits for", true, pass_message, without(&Fault::waits)},
    {"a message between ranks with the device's scope", true, pass_message, scoped(Scope::device)},
    {"a message between blocks with the device's scope", false, pass_message, scoped(Scope::device), true},
    {"a message between blocks with a block's scope", true, pass_message, scoped(Scope::block), true},
    {"a message of a block", false, pass_for_all<true, true>},
    {"a message of a block that did not meet before", true, pass_for_all<false, true>},
    {"a message to a block that did not meet after", true, pass_for_all<true, false>},
    {"a message by way of a third rank", false, pass_by_way_of_a_third},
    {"an old signal is good enough, but old", true, run_ahead<1>},
    {"the signal that says so", false, run_ahead<2>},
    {"a write after a read", false, write_after_read<true>},
    {"a write beside a read", true, write_after_read<false>},
    {"an exchange within a warp", true, pass_within_a_block<Meets::exchange, 1>},
    {"a warp that comes together", false, pass_within_a_block<Meets::together, 31>},
    {"a warp that comes together, and another", true, pass_within_a_block<Meets::together, 32>},
    {"a block that meets", false, pass_within_a_block<Meets::block, 63>},
    {"the same value twice", true, store_the_same},
    {"the same note twice", false, note_the_same},
    {"a look at a note", false, look_at_a_note<true>},
    {"a glance at a note", true, look_at_a_note<false>},
    {"bytes beside each other", false, store_neighbours},
    {"a byte of a word", true, store_overlapping},
    {"sixteen bytes", true, move_quads},
    {"a structure", true, copy_structures},
    {"a launch behind another", false, store_x, {}, false, load_x<0>},
    {"a launch beside another", true, store_x, without(&Fault::streams), false, load_x<0>},
    {"a launch behind another of another rank", true, store_x, {}, false, load_x<1>},
    {"memory that is nobody's", true, store_elsewhere},
    {"constant memory", true, store_in_a_constant},
};

bool run(Detector& detector, Scheduler& scheduler, const Litmus& litmus, unsigned order) {
  Memory memory;
  const Fault fault = litmus.fault;
  std::vector<cuda::Shared> shared(kBlocks);
  detector.begin({kBlocks * emulator::kBlockThreads, emulator::kBlockThreads, litmus.one_rank ? kBlocks : 1});
  detector.shared(&memory, sizeof memory, "memory", 0);
  detector.constant(&fault, sizeof fault);
  scheduler.observe(&detector);
  const Status status = scheduler.run(kBlocks, emulator::kBlockThreads, order, [&](unsigned at) {
    const EmulatedBlock block(scheduler, shared[at], fault);
    const Lane lane{block, at, block.thread()};
    Memory& mine = memory;
    for (const Body body : {litmus.body, litmus.then}) {
      if (!body) continue;
      if (body == litmus.then) scheduler.sync_stream(at, 1, fault.streams);
      const Scheduler::LaneScope scope(scheduler);
      body(lane, mine);
    }
  });
  detector.end();
  const std::vector<Race> found = detector.take();
  const bool races = !found.empty();
  if (status.ok() && races == litmus.races) return true;
  std::printf("FAILED: %s: %s in order %u\n", litmus.what,
              !status.ok() ? status.message().c_str()
              : races      ? "races"
                           : "does not race",
              order);
  if (races) std::printf("  %s\n", detector.describe(found[0]).c_str());
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
  if (all) std::printf("%zu small exchanges in %u orders: races where there are some\n", std::size(kLitmus), kOrders);
  return all;
}

}  // namespace dtcomm::race_detector
