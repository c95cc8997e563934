// One step of a lowered program (dtcomm/schedule/program.py) over peer memory, a launch for each: ring, tree and
// whatever else a schedule says, with the bytes of csrc/engine's machines. A box lies in its owner's room, where peers
// read it. A block works on its share of every chunk, with the same block of the other ranks.
//
// Why a box may be written again: a call begins with every block telling all peers that it has, and waiting for them.
// A rank's launches follow each other, so a peer that has begun this call reads nothing of the one before any more.
#pragma once

#include "cuda/fused/pipeline.cuh"

namespace dtcomm::cuda {

constexpr unsigned kMostTasks = 16;  // of a rank in a step

// An instruction but for Send and Receive, laid over a piece of its chunk. `combines` is Encode, Reduce and Adopt.
enum class Doing : std::uint8_t { combines = 0, copies = 1, forwards = 2 };

struct Task {
  Run run;
  std::int16_t box;  // own, to be written; or -1
  std::int16_t boxes[kMostRanks];
  std::uint8_t owners[kMostRanks];  // of the boxes that are read
  std::uint8_t count, position;     // of those; where the local term stands
  Local local;
  Doing doing;
  bool before;         // peers are told
  bool takes, leaves;  // the residual
  bool output, keep, divides;
  bool joins, canonical;  // as in Call
  std::uint16_t sum;      // the chunk's accumulator
};

// What a rank does in a step, and from whom and to whom it signals: a bit for each peer.
struct Turn {
  Call call;  // over the whole tensors
  std::uint32_t tells, hears, tasks;
  Task task[kMostTasks];
};

struct Step {
  int ranks, first, here;
  unsigned blocks;
  std::uint32_t step, steps;
  bool begins, ends;  // a piece
  std::uint32_t element_bytes, granule_elements;
  std::uint64_t budget;
  std::uint64_t boxes_at, box_stride, sums_at, sum_stride;  // bytes of a room; fp32 sums behind the boxes
  float divisor;
  Layout layout;
  Peer peers[kMostRanks];
  Turn turns[kMostRanks];
};
static_assert(sizeof(Step) < 16384, "an argument of a kernel, beside the family");
static_assert(kMostTasks <= kVerbs * kMostRanks, "a call of each fits what a block shares");

DTCOMM_DEVICE Call& call_of(Shared& shared, unsigned task) {
  return shared.calls[task / kMostRanks][task % kMostRanks];
}

// Granules [from, to) of a task's run, which are this block's.
DTCOMM_DEVICE std::uint64_t share_of(const Step& step, const Run& run, unsigned index) {
  const std::uint64_t granules = (run.numel + step.granule_elements - 1) / step.granule_elements;
  const std::uint64_t from = granules * index / step.blocks * step.granule_elements;
  return from < run.numel ? from : run.numel;
}

// The call that a task is.
DTCOMM_DEVICE void aim_task(const Step& step, const Turn& turn, const Task& task, int rank, unsigned index,
                            Call& call) {
  const std::uint64_t from = share_of(step, task.run, index);
  const std::uint64_t to = share_of(step, task.run, index + 1);
  const std::uint64_t at = from / step.granule_elements * call.granule_bytes;
  const auto box = [&](int owner, int which) {
    return step.peers[owner].room + step.boxes_at + static_cast<std::uint64_t>(which) * step.box_stride + at;
  };
  std::uint8_t* sum = step.peers[rank].room + step.sums_at + task.sum * step.sum_stride + from * sizeof(float);
  const std::uint64_t in = task.run.in + from, out = task.run.out + from;
  const bool summed = task.local == Local::accumulator;
  call.local = nullptr;
  if (task.local == Local::input)
    call.local = static_cast<const std::uint8_t*>(turn.call.local) + in * step.element_bytes;
  if (summed) {
    call.local = sum;
    call.local_dtype = DType::f32;
  }
  call.residual_in = task.takes ? turn.call.residual_in + in : nullptr;
  call.residual_out = task.leaves ? turn.call.residual_out + in : nullptr;
  call.has_local = call.local || call.residual_in;
  call.out = nullptr;
  if (task.output) call.out = static_cast<std::uint8_t*>(turn.call.out) + out * step.element_bytes;
  if (task.keep) {
    call.out = sum;
    call.out_dtype = DType::f32;
  }
  call.payload_out = task.box >= 0 ? box(rank, task.box) : nullptr;
  DTCOMM_LOOP
  for (int t = 0; t < task.count; ++t) call.near[t] = box(task.owners[t], task.boxes[t]);
  call.count = task.count;
  call.position = task.position;
  call.divides = task.divides;
  call.divisor = task.divides ? step.divisor : 1;
  call.joins = task.joins;
  call.canonical = task.canonical;
  set_run(step.layout, {in, out, to - from}, call);
}

template <class Family, class Block>
DTCOMM_DEVICE void do_task(const Block& block, const Step& step, const Task& task, const Call& call,
                           const Family& family) {
  if (elements_of(call) == 0) return;
  if (task.doing == Doing::forwards) {
    move(block, call.near[0], call.payload_out, bytes_of(call));
  } else if (task.doing == Doing::copies) {
    const void* from = task.count ? call.near[0] : call.local;
    const std::uint64_t bytes = elements_of(call) * step.element_bytes;
    if (call.payload_out) move(block, from, call.payload_out, bytes);
    if (call.out) move(block, from, call.out, bytes);
  } else if (call.payload_out) {
    every_tile<kAnyCount, true, true>(block, call, family);
  } else {
    every_tile<kAnyCount, false, false>(block, call, family);
  }
}

template <class Family, class Block>
DTCOMM_DEVICE void do_tasks(const Block& block, const Step& step, const Turn& turn, bool before, const Family& family) {
  DTCOMM_LOOP
  for (unsigned t = 0; t < turn.tasks; ++t) {
    if (turn.task[t].before == before) do_task(block, step, turn.task[t], call_of(block.shared(), t), family);
  }
}

// Waits for a peer's signal. Where it does not come somebody else may have missed a third rank, and said so.
template <class Block>
DTCOMM_DEVICE void hear(const Block& block, const Step& step, int rank, const std::uint32_t* word, std::uint32_t epoch,
                        unsigned peer) {
  if (block.wait(word, epoch, step.budget)) return;
  Pad& pad = *step.peers[rank].pad;
  const std::uint32_t told = block.look(&pad.told);
  const std::uint32_t missing = told ? told : 1 + peer;
  block.note(&block.shared().missing, missing);
  block.note(&pad.missing, missing);
  DTCOMM_LOOP
  for (int other = 0; other < step.ranks; ++other) {
    if (other != rank && 1U + static_cast<unsigned>(other) != missing) {
      block.signal(&step.peers[other].pad->told, missing);
    }
  }
}

// Thread block `index` of a rank.
template <class Family, class Block>
DTCOMM_DEVICE void run_step(const Block& block, const Step& step, const Family& family, int rank, unsigned index) {
  Shared& shared = block.shared();
  const Turn& turn = step.turns[rank - step.first];
  Pad& pad = *step.peers[rank].pad;
  const unsigned thread = block.thread();
  const std::uint32_t epoch = pad.epoch[static_cast<unsigned>(Algorithm::program)][index];
  const bool peer = thread < static_cast<unsigned>(step.ranks) && static_cast<int>(thread) != rank;
  if (thread == 0) {
    shared.missing = 0;
    shared.lost = block.look(&pad.missing);
  }
  if (thread < turn.tasks) {
    copy_call(turn.call, call_of(shared, thread));
    aim_task(step, turn, turn.task[thread], rank, index, call_of(shared, thread));
  }
  if (!aimed(block)) return;
  if (step.begins) {
    constexpr auto kEntered = static_cast<unsigned>(Stage::entered);
    if (peer) {
      block.signal(&step.peers[thread].pad->signals[kEntered][index][rank], epoch + 1);
      hear(block, step, rank, &pad.signals[kEntered][index][thread], epoch + 1, thread);
    }
    block.meet(Point::entered);
    if (shared.missing) return;
  }
  do_tasks(block, step, turn, true, family);
  block.meet(Point::stored);
  constexpr auto kStepped = static_cast<unsigned>(Stage::stepped);
  if (peer && (turn.tells >> thread & 1)) {
    block.signal(&step.peers[thread].pad->signals[kStepped][index][rank], epoch + step.step + 1);
  }
  if (peer && (turn.hears >> thread & 1)) {
    hear(block, step, rank, &pad.signals[kStepped][index][thread], epoch + step.step + 1, thread);
  }
  block.meet(Point::arrived);
  if (shared.missing) return;
  do_tasks(block, step, turn, false, family);
  if (step.ends && thread == 0) pad.epoch[static_cast<unsigned>(Algorithm::program)][index] = epoch + step.steps;
}

}  // namespace dtcomm::cuda
