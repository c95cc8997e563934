// One step of a lowered program (dtcomm/schedule/program.py) over peer memory, one launch for each step: ring, tree and
// any other schedule, with the bytes of csrc/engine's interpreter. A box lies in its owner's peer buffer. Peers load it
// from there; or, if the call has inboxes, the owner copies it into a box of each receiver, and no rank loads from a
// peer's memory. A block works on its share of every chunk, together with the same block of the other ranks.
//
// When a box may be written again: at the beginning of a call every block signals all peers and waits for them. The
// launches of a rank follow each other, so a peer that has begun this call no longer reads anything of the previous
// one, neither here nor in its own inbox.
#pragma once

#include "cuda/fused/pipeline.cuh"

namespace dtcomm::cuda {

constexpr unsigned kMaxTasks = 16;  // of a rank in a step

// An instruction other than Receive, applied to a piece of its chunk. `combine` is Encode, Reduce and Decode; `push` is
// Send where there are inboxes.
enum class TaskKind : std::uint8_t { combine = 0, copy = 1, forward = 2, push = 3 };

// When a task runs: it writes own payloads, pushes them, or needs the step's signals of peers.
enum class Phase : std::uint8_t { write = 0, push = 1, after_signals = 2 };

struct Task {
  TensorRange range;
  std::int16_t box;  // the own box that is written, or pushed; or -1
  std::int16_t boxes[kMaxRanks];
  std::uint8_t owners[kMaxRanks];  // of the boxes that are read, or that a push writes
  std::uint8_t count, position;    // of these boxes; the index of the local term
  Local local;
  TaskKind kind;
  Phase phase;
  bool reads_residual, writes_residual;  // the residual
  bool output, keep, divides;
  bool is_computed, canonical_nan;  // as in KernelParams
  std::uint16_t sum;                // the chunk's accumulator
};

// The tasks of a rank in a step, and the peers that it signals and waits for, a bit for each.
struct RankStep {
  KernelParams params;  // over the whole tensors
  std::uint32_t signal_mask, wait_mask, task_count;
  Task task[kMaxTasks];
};

struct StepParams {
  int ranks, first_rank, local_ranks;
  unsigned blocks;
  std::uint32_t step, steps;
  bool begins, ends;  // the first or last launch of a piece
  bool pushes;        // there are inboxes
  std::uint32_t element_bytes, granule_elements;
  std::uint64_t timeout_ns;
  std::uint64_t boxes_at, box_stride, sums_at,
      sum_stride;  // offsets in a peer buffer; the fp32 sums lie behind the boxes
  float divisor;
  Layout layout;
  PeerPointers peers[kMaxRanks];
  RankStep rank_steps[kMaxRanks];
};
static_assert(sizeof(StepParams) < 16384, "fits the arguments of a kernel, with the family");
static_assert(kMaxTasks <= kPasses * kMaxRanks, "the parameters of all tasks fit the block's shared memory");

DTCOMM_DEVICE KernelParams& task_params(Shared& shared, unsigned task) {
  return shared.params[task / kMaxRanks][task % kMaxRanks];
}

// The first element of a task's range that belongs to block `index`; cut at granules.
DTCOMM_DEVICE std::uint64_t block_start(const StepParams& step, const TensorRange& run, unsigned index) {
  const std::uint64_t granules = (run.numel + step.granule_elements - 1) / step.granule_elements;
  const std::uint64_t from = granules * index / step.blocks * step.granule_elements;
  return from < run.numel ? from : run.numel;
}

// Points the parameters of a task at this block's share of it.
DTCOMM_DEVICE void set_task_pointers(const StepParams& step, const RankStep& rank_step, const Task& task, int rank,
                                     unsigned index, KernelParams& params) {
  const std::uint64_t from = block_start(step, task.range, index);
  const std::uint64_t to = block_start(step, task.range, index + 1);
  const std::uint64_t at = from / step.granule_elements * params.granule_bytes;
  const auto box = [&](int owner, int which) {
    return step.peers[owner].buffer + step.boxes_at + static_cast<std::uint64_t>(which) * step.box_stride + at;
  };
  std::uint8_t* sum = step.peers[rank].buffer + step.sums_at + task.sum * step.sum_stride + from * sizeof(float);
  const std::uint64_t in = task.range.in + from, out = task.range.out + from;
  const bool summed = task.local == Local::accumulator;
  params.local = nullptr;
  if (task.local == Local::input)
    params.local = static_cast<const std::uint8_t*>(rank_step.params.local) + in * step.element_bytes;
  if (summed) {
    params.local = sum;
    params.local_dtype = DType::f32;
  }
  params.residual_in = task.reads_residual ? rank_step.params.residual_in + in : nullptr;
  params.residual_out = task.writes_residual ? rank_step.params.residual_out + in : nullptr;
  params.has_local = params.local || params.residual_in;
  params.out = nullptr;
  if (task.output) params.out = static_cast<std::uint8_t*>(rank_step.params.out) + out * step.element_bytes;
  if (task.keep) {
    params.out = sum;
    params.out_dtype = DType::f32;
  }
  params.payload_out = task.box >= 0 ? box(rank, task.box) : nullptr;
  DTCOMM_LOOP
  for (int t = 0; t < task.count; ++t) params.payloads[t] = box(task.owners[t], task.boxes[t]);
  params.count = task.count;
  params.position = task.position;
  params.divides = task.divides;
  params.divisor = task.divides ? step.divisor : 1;
  params.is_computed = task.is_computed;
  params.canonical_nan = task.canonical_nan;
  set_range(step.layout, {in, out, to - from}, params);
}

// Copies the block's share of an own payload to the boxes of other ranks. Sixteen bytes a thread, as stores through a
// PCIe link should be large, and all of them of one warp beside each other.
template <class Block>
DTCOMM_DEVICE void push_payload(const Block& block, const KernelParams& params) {
  const std::uint64_t bytes = payload_bytes(params);
  for (std::uint64_t at = block.thread() * sizeof(Quad); at < bytes; at += block.threads() * sizeof(Quad)) {
    const Quad quad = load_quad(params.payload_out + at);
    for (int t = 0; t < params.count; ++t) store_quad(quad, const_cast<std::uint8_t*>(params.payloads[t]) + at);
  }
}

template <class Family, class Block>
DTCOMM_DEVICE void run_task(const Block& block, const StepParams& step, const Task& task, const KernelParams& params,
                            const Family& family) {
  if (element_count(params) == 0) return;
  if (task.kind == TaskKind::push) {
    push_payload(block, params);
  } else if (task.kind == TaskKind::forward) {
    copy_bytes(block, params.payloads[0], params.payload_out, payload_bytes(params));
  } else if (task.kind == TaskKind::copy) {
    const void* from = task.count ? params.payloads[0] : params.local;
    const std::uint64_t bytes = element_count(params) * step.element_bytes;
    if (params.payload_out) copy_bytes(block, from, params.payload_out, bytes);
    if (params.out) copy_bytes(block, from, params.out, bytes);
  } else if (params.payload_out) {
    combine_range<kAnyCount, true, true>(block, params, family);
  } else {
    combine_range<kAnyCount, false, false>(block, params, family);
  }
}

template <class Family, class Block>
DTCOMM_DEVICE void run_tasks(const Block& block, const StepParams& step, const RankStep& rank_step, Phase phase,
                             const Family& family) {
  DTCOMM_LOOP
  for (unsigned t = 0; t < rank_step.task_count; ++t) {
    if (rank_step.task[t].phase == phase)
      run_task(block, step, rank_step.task[t], task_params(block.shared(), t), family);
  }
}

// Waits for a peer's signal. Where it does not come, that peer may have missed a third rank and have reported it.
template <class Block>
DTCOMM_DEVICE void wait_for_peer(const Block& block, const StepParams& step, int rank, const std::uint32_t* word,
                                 std::uint32_t epoch, unsigned peer) {
  if (block.wait(word, epoch, step.timeout_ns)) return;
  SignalPad& pad = *step.peers[rank].pad;
  const std::uint32_t reported_missing = block.load_acquire(&pad.reported_missing);
  const std::uint32_t missing_rank = reported_missing ? reported_missing : 1 + peer;
  block.store_relaxed(&block.shared().missing_rank, missing_rank);
  block.store_relaxed(&pad.missing_rank, missing_rank);
  DTCOMM_LOOP
  for (int other = 0; other < step.ranks; ++other) {
    if (other != rank && 1U + static_cast<unsigned>(other) != missing_rank) {
      block.signal(&step.peers[other].pad->reported_missing, missing_rank);
    }
  }
}

// The step by thread block `index` of a rank.
template <class Family, class Block>
DTCOMM_DEVICE void run_step(const Block& block, const StepParams& step, const Family& family, int rank,
                            unsigned index) {
  Shared& shared = block.shared();
  const RankStep& rank_step = step.rank_steps[rank - step.first_rank];
  SignalPad& pad = *step.peers[rank].pad;
  const unsigned thread = block.thread();
  const std::uint32_t epoch = pad.epoch[static_cast<unsigned>(Algorithm::program)][index];
  const bool peer = thread < static_cast<unsigned>(step.ranks) && static_cast<int>(thread) != rank;
  if (thread == 0) {
    shared.missing_rank = 0;
    shared.missing_before = block.load_acquire(&pad.missing_rank);
  }
  if (thread < rank_step.task_count) {
    copy_params(rank_step.params, task_params(shared, thread));
    set_task_pointers(step, rank_step, rank_step.task[thread], rank, index, task_params(shared, thread));
  }
  if (!pointers_ready(block)) return;
  if (step.begins) {
    constexpr auto kEntered = static_cast<unsigned>(SignalStage::entered);
    if (peer) {
      block.signal(&step.peers[thread].pad->signals[kEntered][index][rank], epoch + 1);
      wait_for_peer(block, step, rank, &pad.signals[kEntered][index][thread], epoch + 1, thread);
    }
    block.sync_block(BarrierId::peers_entered);
    if (shared.missing_rank) return;
  }
  run_tasks(block, step, rank_step, Phase::write, family);
  if (step.pushes) {
    block.sync_block(BarrierId::payloads_written);
    run_tasks(block, step, rank_step, Phase::push, family);
  }
  block.sync_block(BarrierId::payloads_stored);
  constexpr auto kStepped = static_cast<unsigned>(SignalStage::stepped);
  if (peer && (rank_step.signal_mask >> thread & 1)) {
    block.signal(&step.peers[thread].pad->signals[kStepped][index][rank], epoch + step.step + 1);
  }
  if (peer && (rank_step.wait_mask >> thread & 1)) {
    wait_for_peer(block, step, rank, &pad.signals[kStepped][index][thread], epoch + step.step + 1, thread);
  }
  block.sync_block(BarrierId::payloads_arrived);
  if (shared.missing_rank) return;
  run_tasks(block, step, rank_step, Phase::after_signals, family);
  if (step.ends && thread == 0) pad.epoch[static_cast<unsigned>(Algorithm::program)][index] = epoch + step.steps;
}

}  // namespace dtcomm::cuda
