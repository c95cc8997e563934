// Turns lowered programs into the parameters of one kernel launch for each of their steps.
#include <algorithm>

#include "cuda/fused/plan.h"

namespace dtcomm::cuda {

namespace {

constexpr int kMaxChunks = 65535, kMaxBoxes = 32767;  // that a Task can name

std::uint64_t granules_of(const Layout& layout, std::uint64_t numel) {
  return (numel + layout.granule - 1) / layout.granule;
}

// Where a chunk lies in the caller's tensors.
TensorRange chunk_range_of(const FusedSpec& spec, const Layout& layout, int chunk, int chunks) {
  const ChunkLayout chunk_layout{geometry_of(spec.collective), static_cast<std::size_t>(chunks),
                                 static_cast<std::size_t>(spec.ranks), &spec.splits};
  const ElementRange range = chunk_range(chunk_layout, {spec.numel, layout.granule}, static_cast<std::size_t>(chunk));
  return {range.in_offset, range.out_offset, range.numel};
}

const Program& program_of(const FusedSpec& spec) { return spec.programs[0].program; }

std::uint64_t largest_chunk(const FusedSpec& spec, const Layout& layout) {
  std::uint64_t most = 0;
  for (int chunk = 0; chunk < program_of(spec).chunks; ++chunk) {
    most = std::max(most, granules_of(layout, chunk_range_of(spec, layout, chunk, program_of(spec).chunks).numel));
  }
  return most;
}

// Boxes of a rank: those of its own payloads, then its inbox.
int boxes_of(const FusedSpec& spec) {
  std::size_t largest_inbox = 0;
  for (const Inbox& inbox : spec.inboxes) largest_inbox = std::max(largest_inbox, inbox.size());
  return program_of(spec).max_boxes() + static_cast<int>(largest_inbox);
}

// The box in which `receiver` finds box `box` of `owner`; -1: nowhere.
int inbox_box(const FusedSpec& spec, int receiver, int owner, int box) {
  const Inbox& inbox = spec.inboxes[static_cast<std::size_t>(receiver)];
  const auto found = std::find(inbox.begin(), inbox.end(), std::pair(owner, box));
  return found == inbox.end() ? -1 : program_of(spec).max_boxes() + static_cast<int>(found - inbox.begin());
}

// Bytes of boxes for one granule of every chunk and, where some rank keeps sums, of its fp32 sums.
std::uint64_t bytes_of_granule(const FusedSpec& spec, const Layout& layout) {
  const auto boxes = static_cast<std::uint64_t>(boxes_of(spec));
  const auto chunks = static_cast<std::uint64_t>(spec.keeps_sums ? program_of(spec).chunks : 0);
  return boxes * layout.bytes(layout.granule) + chunks * layout.granule * sizeof(float);
}

// Granules of a chunk that a piece takes.
std::uint64_t piece_of(const FusedSpec& spec, const Layout& layout) {
  const std::uint64_t fit = spec.buffer_layout.box_bytes / bytes_of_granule(spec, layout);
  const std::uint64_t wanted = spec.section ? spec.section : std::max<std::uint64_t>(largest_chunk(spec, layout), 1);
  return std::min(fit, wanted);
}

void add_box(int owner, int box, Task& task) {
  task.owners[task.count] = static_cast<std::uint8_t>(owner);
  task.boxes[task.count++] = static_cast<std::int16_t>(box);
}

// The copies of an own payload into the receivers' inboxes.
Task push_of(const FusedSpec& spec, int rank, const Instruction& send, const TensorRange& range) {
  Task task = {};
  task.range = range;
  task.kind = TaskKind::push;
  task.phase = Phase::push;
  task.box = static_cast<std::int16_t>(send.box);
  for (const int peer : send.peers) add_box(peer, inbox_box(spec, peer, rank, send.box), task);
  return task;
}

Task task_of(const FusedSpec& spec, int rank, const RankTensors& tensors, const Instruction& instruction,
             const TensorRange& range) {
  const bool divides = instruction.divide && spec.divisor != 1;
  const bool residual = tensors.residual != nullptr;
  Task task = {};
  task.range = range;
  task.box = static_cast<std::int16_t>(instruction.box);
  task.sum = static_cast<std::uint16_t>(instruction.chunk);
  task.local = instruction.local;
  task.reads_residual = residual && instruction.reads_residual;
  task.writes_residual = residual && instruction.writes_residual;
  task.output = instruction.output;
  task.keep = instruction.keep_partial_sum;
  task.divides = divides;
  task.position = static_cast<std::uint8_t>(instruction.position);
  task.phase = Phase::after_signals;
  const auto reads = [&](int owner, int box) {
    if (spec.inboxes.empty() || owner == rank) return add_box(owner, box, task);
    add_box(rank, inbox_box(spec, rank, owner, box), task);
  };
  switch (instruction.op) {
    case Op::encode:
      task.local = Local::input;
      task.phase = Phase::write;
      break;
    case Op::forward:
      task.kind = TaskKind::forward;
      task.phase = Phase::write;
      reads(instruction.peer, instruction.source);
      break;
    case Op::decode:
      task.box = -1;
      task.output = true;
      reads(instruction.peer, instruction.box);
      break;
    case Op::copy:
      task.kind = TaskKind::copy;
      task.local = Local::input;
      task.output = true;
      break;
    default:
      for (const BoxRef& input : instruction.inputs) reads(input.rank, input.box);
  }
  task.output = task.output && tensors.output;
  // As make_params() has it.
  const bool local = task.local != Local::none;
  task.is_computed = task.count + (local ? 1 : 0) > 1 || divides || (task.local == Local::input && task.reads_residual);
  task.canonical_nan = task.is_computed || task.box >= 0 || (!local && !is_cast(spec.codec));
  const bool lone =
      task.count + (local ? 1 : 0) == 1 && !task.reads_residual && !task.writes_residual && !divides && !task.keep;
  const bool moves = instruction.op == Op::encode || instruction.op == Op::decode;
  if (spec.codec.family == Family::none && moves && lone) task.kind = TaskKind::copy;
  return task;
}

// What a rank does in a step, before it signals its peers and after they have signalled.
struct StepTasks {
  std::vector<Task> before, after;  // `before`: what writes payloads, then what pushes them
  std::uint32_t signal_mask = 0, wait_mask = 0;

  bool idle() const { return before.empty() && after.empty() && signal_mask == 0 && wait_mask == 0; }
};

StepTasks step_tasks(const FusedSpec& spec, const Layout& layout, const RankTensors& tensors, std::size_t index,
                     std::uint64_t piece, int step) {
  const LoweredProgram& lowered = spec.programs[index];
  const std::uint64_t most = piece_of(spec, layout) * layout.granule;
  StepTasks tasks;
  std::vector<Task> pushes;
  for (std::size_t i = 0; i < lowered.program.instructions.size(); ++i) {
    const Instruction& instruction = lowered.program.instructions[i];
    // What no rank sends has no step of its own: it is done in the last one.
    if (std::min(lowered.step_of[i], spec.steps - 1) != step) continue;
    if (instruction.op == Op::receive) {
      tasks.wait_mask |= 1U << instruction.peer;
      continue;
    }
    TensorRange range = chunk_range_of(spec, layout, instruction.chunk, lowered.program.chunks);
    const std::uint64_t from = std::min(piece * most, range.numel);
    range = {range.in + from, range.out + from, std::min(most, range.numel - from)};
    if (instruction.op == Op::send) {
      for (const int peer : instruction.peers) tasks.signal_mask |= 1U << peer;
      if (!spec.inboxes.empty()) pushes.push_back(push_of(spec, lowered.program.rank, instruction, range));
    } else {
      const Task task = task_of(spec, lowered.program.rank, tensors, instruction, range);
      (task.phase == Phase::write ? tasks.before : tasks.after).push_back(task);
    }
  }
  tasks.before.insert(tasks.before.end(), pushes.begin(), pushes.end());
  return tasks;
}

// Appends the launches of a step: one, unless a rank has more tasks than a launch takes. All local ranks signal and
// wait in the same launch: a block that waited for a later launch of its own device would wait for ever.
void add_launches(const std::vector<StepTasks>& ranks, const StepParams& step, std::vector<StepParams>& launches) {
  const auto last_of = [](std::size_t tasks) { return tasks == 0 ? 0 : (tasks - 1) / kMaxTasks; };
  std::size_t signalling = 0, last = 0;  // which launch
  for (const StepTasks& rank : ranks) signalling = std::max(signalling, last_of(rank.before.size()));
  const auto after_signal = [&](const StepTasks& rank) { return std::max(rank.before.size(), signalling * kMaxTasks); };
  for (const StepTasks& rank : ranks) last = std::max(last, last_of(after_signal(rank) + rank.after.size()));
  last = std::max(last, signalling);
  for (std::size_t launch = 0; launch <= last; ++launch) {
    launches.push_back(step);
    StepParams& params = launches.back();
    params.begins = step.begins && launch == 0;
    params.ends = step.ends && launch == last;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const StepTasks& rank = ranks[i];
      RankStep& rank_step = params.rank_steps[i];
      rank_step.signal_mask = launch == signalling ? rank.signal_mask : 0;
      rank_step.wait_mask = launch == signalling ? rank.wait_mask : 0;
      rank_step.task_count = 0;
      for (std::size_t at = launch * kMaxTasks; at < (launch + 1) * kMaxTasks; ++at) {
        if (at < rank.before.size()) {
          rank_step.task[rank_step.task_count++] = rank.before[at];
        } else if (at >= after_signal(rank) && at - after_signal(rank) < rank.after.size()) {
          rank_step.task[rank_step.task_count++] = rank.after[at - after_signal(rank)];
        }
      }
    }
  }
}

// Whether every payload that a rank sends or reads has a place in an inbox.
Status check_inboxes(const FusedSpec& spec, const Program& program) {
  const auto check = [&](int receiver, int owner, int box) {
    if (owner == receiver || inbox_box(spec, receiver, owner, box) >= 0) return Status();
    return Status::error("inboxes: payload " + std::to_string(box) + " of rank " + std::to_string(owner) +
                         " has no place in the inbox of rank " + std::to_string(receiver));
  };
  for (const Instruction& instruction : program.instructions) {
    std::vector<BoxRef> reads = instruction.inputs;
    if (instruction.op == Op::receive || instruction.op == Op::decode)
      reads.push_back({instruction.peer, instruction.box, 0});
    if (instruction.op == Op::forward) reads.push_back({instruction.peer, instruction.source, 0});
    for (const BoxRef& read : reads) {
      if (Status status = check(program.rank, read.rank, read.box); !status.ok()) return status;
    }
    for (const int peer : instruction.peers) {
      if (Status status = check(peer, program.rank, instruction.box); !status.ok()) return status;
    }
  }
  return Status();
}

Status check_program(const FusedSpec& spec, const LoweredProgram& lowered, int rank) {
  const Program& program = lowered.program;
  const std::string whose = "programs: rank " + std::to_string(rank) + "'s ";
  if (program.rank != rank || program.ranks != spec.ranks) return Status::error(whose + "is another rank's");
  if (lowered.step_of.size() != program.instructions.size())
    return Status::error(whose + "does not have a step for each instruction");
  if (program.chunks != program_of(spec).chunks || program.boxes != program_of(spec).boxes) {
    return Status::error(whose + "belongs to another schedule than the others'");
  }
  for (const Instruction& instruction : program.instructions) {
    if (instruction.inputs.size() > kMaxRanks) return Status::error(whose + "sums more than one term of each rank");
    if (instruction.keep_partial_sum && !spec.keeps_sums)
      return Status::error(whose + "keeps sums, which keeps_sums denies");
  }
  return spec.inboxes.empty() ? Status() : check_inboxes(spec, program);
}

}  // namespace

std::uint64_t box_bytes(const FusedSpec& spec) {
  const Layout layout = layout_of(spec.codec, spec.dtype);
  return std::max<std::uint64_t>(largest_chunk(spec, layout), 1) * bytes_of_granule(spec, layout);
}

bool has_sums(const FusedSpec& spec) {
  return std::any_of(spec.programs.begin(), spec.programs.end(), [](const LoweredProgram& lowered) {
    const auto& all = lowered.program.instructions;
    return std::any_of(all.begin(), all.end(),
                       [](const Instruction& instruction) { return instruction.op == Op::reduce; });
  });
}

bool reads_input(const FusedSpec& spec, int i) {
  const Program& program = spec.programs[static_cast<std::size_t>(i)].program;
  const Layout layout = layout_of(spec.codec, spec.dtype);
  for (int chunk = 0; chunk < program.chunks; ++chunk) {
    if (program.reads_input[static_cast<std::size_t>(chunk)] &&
        chunk_range_of(spec, layout, chunk, program.chunks).numel) {
      return true;
    }
  }
  return false;
}

Status check_programs(const FusedSpec& spec) {
  if (spec.programs.size() != static_cast<std::size_t>(spec.local_ranks))
    return Status::error("programs: one for each local rank");
  if (spec.steps < 1) return Status::error("steps: a program has at least one");
  const Layout layout = layout_of(spec.codec, spec.dtype);
  if (program_of(spec).boxes.size() != static_cast<std::size_t>(spec.ranks))
    return Status::error("programs: are for another number of ranks");
  if (!spec.splits.empty() && program_of(spec).chunks != spec.ranks * spec.ranks) {
    return Status::error("splits: need a chunk of each pair of ranks");
  }
  if (!spec.inboxes.empty() && spec.inboxes.size() != static_cast<std::size_t>(spec.ranks))
    return Status::error("inboxes: of each rank, or none");
  if (program_of(spec).chunks > kMaxChunks || boxes_of(spec) > kMaxBoxes) {
    return Status::error("programs: have more than " + std::to_string(kMaxChunks) + " chunks, or " +
                         std::to_string(kMaxBoxes) + " boxes of a rank");
  }
  if (spec.buffer_layout.box_bytes < bytes_of_granule(spec, layout)) {
    return Status::error("buffer_layout: box_bytes must be at least " + std::to_string(bytes_of_granule(spec, layout)) +
                         ", got " + std::to_string(spec.buffer_layout.box_bytes));
  }
  for (int i = 0; i < spec.local_ranks; ++i) {
    Status status = check_program(spec, spec.programs[static_cast<std::size_t>(i)], spec.first_rank + i);
    if (!status.ok()) return status;
  }
  return Status();
}

std::vector<StepParams> make_step_params(const FusedSpec& spec, const LaunchTensors& tensors) {
  const Layout layout = layout_of(spec.codec, spec.dtype);
  const std::uint64_t most = piece_of(spec, layout);
  const std::uint64_t pieces = (largest_chunk(spec, layout) + most - 1) / most;
  StepParams step = {};
  step.ranks = spec.ranks;
  step.first_rank = spec.first_rank;
  step.local_ranks = spec.local_ranks;
  step.blocks = spec.blocks;
  step.steps = static_cast<std::uint32_t>(spec.steps);
  step.element_bytes = static_cast<std::uint32_t>(size_of(spec.dtype));
  step.granule_elements = static_cast<std::uint32_t>(layout.granule);
  step.pushes = !spec.inboxes.empty();
  step.timeout_ns = spec.timeout_ns;
  step.boxes_at = memory_bytes(spec.buffer_layout) - kPadBytes - spec.buffer_layout.box_bytes;
  step.box_stride = most * layout.bytes(layout.granule);
  step.sums_at = step.boxes_at + static_cast<std::uint64_t>(boxes_of(spec)) * step.box_stride;
  step.sum_stride = most * layout.granule * sizeof(float);
  step.divisor = static_cast<float>(spec.divisor);
  step.layout = layout;
  std::copy(spec.peers, spec.peers + spec.ranks, step.peers);
  for (int i = 0; i < spec.local_ranks; ++i) {
    step.rank_steps[i].params = whole_tensor_params(spec, tensors.ranks[i]);
  }
  std::vector<StepParams> steps;
  steps.reserve(pieces * static_cast<std::size_t>(spec.steps));  // each is large
  for (std::uint64_t piece = 0; piece < pieces; ++piece) {
    for (int s = 0; s < spec.steps; ++s) {
      step.step = static_cast<std::uint32_t>(s);
      step.begins = s == 0;
      step.ends = s == spec.steps - 1;
      bool idle = !step.begins && !step.ends;
      std::vector<StepTasks> ranks;
      for (int i = 0; i < spec.local_ranks; ++i) {
        ranks.push_back(step_tasks(spec, layout, tensors.ranks[i], static_cast<std::size_t>(i), piece, s));
        idle &= ranks.back().idle();
      }
      if (!idle) add_launches(ranks, step, steps);
    }
  }
  return steps;
}

}  // namespace dtcomm::cuda
