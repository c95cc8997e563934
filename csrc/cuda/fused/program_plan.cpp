// From lowered programs to the launches of their steps.
#include <algorithm>

#include "core/chunk_layout.h"
#include "cuda/fused/plan.h"

namespace dtcomm::cuda {

namespace {

constexpr int kMostChunks = 65535, kMostBoxes = 32767;  // that a Task can name

std::uint64_t granules_of(const Layout& layout, std::uint64_t numel) {
  return (numel + layout.granule - 1) / layout.granule;
}

Geometry geometry_of(Collective collective) {
  switch (collective) {
    case Collective::reduce_scatter:
      return Geometry::scatter;
    case Collective::all_gather:
      return Geometry::gather;
    case Collective::all_to_all:
      return Geometry::exchange;
    default:
      return Geometry::whole;
  }
}

// Where a chunk lies in the caller's tensors.
Run chunk_of(const FusedCall& call, const Layout& layout, int chunk, int chunks) {
  const ChunkLayout chunk_layout{geometry_of(call.collective), static_cast<std::size_t>(chunks),
                                 static_cast<std::size_t>(call.ranks), &call.splits};
  const ElementRange range = chunk_range(chunk_layout, {call.numel, layout.granule}, static_cast<std::size_t>(chunk));
  return {range.in_offset, range.out_offset, range.numel};
}

const Program& program_of(const FusedCall& call) { return call.programs[0].program; }

std::uint64_t largest_chunk(const FusedCall& call, const Layout& layout) {
  std::uint64_t most = 0;
  for (int chunk = 0; chunk < program_of(call).chunks; ++chunk) {
    most = std::max(most, granules_of(layout, chunk_of(call, layout, chunk, program_of(call).chunks).numel));
  }
  return most;
}

// Of one granule of every chunk: its boxes and, for the ranks that need them, its sums.
std::uint64_t bytes_of_granule(const FusedCall& call, const Layout& layout) {
  const auto boxes = static_cast<std::uint64_t>(program_of(call).max_boxes());
  const auto chunks = static_cast<std::uint64_t>(call.keeps ? program_of(call).chunks : 0);
  return boxes * layout.bytes(layout.granule) + chunks * layout.granule * sizeof(float);
}

// Granules of a chunk that a piece takes.
std::uint64_t piece_of(const FusedCall& call, const Layout& layout) {
  const std::uint64_t fit = call.room.box_bytes / bytes_of_granule(call, layout);
  const std::uint64_t wanted = call.section ? call.section : std::max<std::uint64_t>(largest_chunk(call, layout), 1);
  return std::min(fit, wanted);
}

Task task_of(const FusedCall& call, const Share& share, const Instruction& instruction, const Run& run) {
  const bool divides = instruction.divide && call.divisor != 1;
  const bool residual = share.residual != nullptr;
  Task task = {};
  task.run = run;
  task.box = static_cast<std::int16_t>(instruction.box);
  task.sum = static_cast<std::uint16_t>(instruction.chunk);
  task.local = instruction.local;
  task.takes = residual && instruction.reads_residual;
  task.leaves = residual && instruction.writes_residual;
  task.output = instruction.output;
  task.keep = instruction.keep;
  task.divides = divides;
  task.position = static_cast<std::uint8_t>(instruction.position);
  const auto reads = [&](int owner, int box) {
    task.owners[task.count] = static_cast<std::uint8_t>(owner);
    task.boxes[task.count++] = static_cast<std::int16_t>(box);
  };
  switch (instruction.op) {
    case Op::encode:
      task.local = Local::input;
      task.before = true;
      break;
    case Op::forward:
      task.doing = Doing::forwards;
      task.before = true;
      reads(instruction.peer, instruction.source);
      break;
    case Op::decode:
      task.box = -1;
      task.output = true;
      reads(instruction.peer, instruction.box);
      break;
    case Op::copy:
      task.doing = Doing::copies;
      task.local = Local::input;
      task.output = true;
      break;
    default:
      for (const BoxRef& input : instruction.inputs) reads(input.rank, input.box);
  }
  task.output = task.output && share.output;
  // As plan() has it.
  const bool local = task.local != Local::none;
  task.joins = task.count + (local ? 1 : 0) > 1 || divides || (task.local == Local::input && task.takes);
  task.canonical = task.joins || task.box >= 0 || (!local && !is_cast(call.codec));
  const bool lone = task.count + (local ? 1 : 0) == 1 && !task.takes && !task.leaves && !divides && !task.keep;
  const bool moves = instruction.op == Op::encode || instruction.op == Op::decode;
  if (call.codec.family == Family::none && moves && lone) task.doing = Doing::copies;
  return task;
}

// What a rank does in a step, before its peers are told and after they have told.
struct Doings {
  std::vector<Task> before, after;
  std::uint32_t tells = 0, hears = 0;

  bool idle() const { return before.empty() && after.empty() && tells == 0 && hears == 0; }
};

Doings doings(const FusedCall& call, const Layout& layout, std::size_t index, std::uint64_t piece, int step) {
  const Lowered& lowered = call.programs[index];
  const std::uint64_t most = piece_of(call, layout) * layout.granule;
  Doings found;
  for (std::size_t i = 0; i < lowered.program.instructions.size(); ++i) {
    const Instruction& instruction = lowered.program.instructions[i];
    // What nobody sends is left to the last step.
    if (std::min(lowered.step_of[i], call.steps - 1) != step) continue;
    if (instruction.op == Op::send) {
      for (const int peer : instruction.peers) found.tells |= 1U << peer;
    } else if (instruction.op == Op::receive) {
      found.hears |= 1U << instruction.peer;
    } else {
      Run run = chunk_of(call, layout, instruction.chunk, lowered.program.chunks);
      const std::uint64_t from = std::min(piece * most, run.numel);
      run = {run.in + from, run.out + from, std::min(most, run.numel - from)};
      const Task task = task_of(call, call.shares[index], instruction, run);
      (task.before ? found.before : found.after).push_back(task);
    }
  }
  return found;
}

// The launches of a step, one unless a rank has more tasks than one takes. All ranks that are here tell and hear in the
// same one: a block that waited for a later launch of its own device would wait for ever.
void add_launches(const std::vector<Doings>& ranks, const Step& step, std::vector<Step>& launches) {
  const auto last_of = [](std::size_t tasks) { return tasks == 0 ? 0 : (tasks - 1) / kMostTasks; };
  std::size_t signals = 0, last = 0;  // which launch
  for (const Doings& each : ranks) signals = std::max(signals, last_of(each.before.size()));
  const auto behind = [&](const Doings& each) { return std::max(each.before.size(), signals * kMostTasks); };
  for (const Doings& each : ranks) last = std::max(last, last_of(behind(each) + each.after.size()));
  last = std::max(last, signals);
  for (std::size_t launch = 0; launch <= last; ++launch) {
    launches.push_back(step);
    Step& made = launches.back();
    made.begins = step.begins && launch == 0;
    made.ends = step.ends && launch == last;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const Doings& rank = ranks[i];
      Turn& turn = made.turns[i];
      turn.tells = launch == signals ? rank.tells : 0;
      turn.hears = launch == signals ? rank.hears : 0;
      turn.tasks = 0;
      for (std::size_t at = launch * kMostTasks; at < (launch + 1) * kMostTasks; ++at) {
        if (at < rank.before.size()) {
          turn.task[turn.tasks++] = rank.before[at];
        } else if (at >= behind(rank) && at - behind(rank) < rank.after.size()) {
          turn.task[turn.tasks++] = rank.after[at - behind(rank)];
        }
      }
    }
  }
}

std::string why_not_program(const FusedCall& call, const Lowered& lowered, int rank) {
  const Program& program = lowered.program;
  const std::string whose = "programs: rank " + std::to_string(rank) + "'s ";
  if (program.rank != rank || program.ranks != call.ranks) return whose + "is another rank's";
  if (lowered.step_of.size() != program.instructions.size()) return whose + "has not a step for each instruction";
  if (program.chunks != program_of(call).chunks || program.boxes != program_of(call).boxes) {
    return whose + "is of another schedule than the others'";
  }
  for (const Instruction& instruction : program.instructions) {
    if (instruction.inputs.size() > kMostRanks) return whose + "sums more than a term of each rank";
    if (instruction.keep && !call.keeps) return whose + "keeps sums, for which there is no room";
  }
  return "";
}

}  // namespace

std::uint64_t box_bytes(const FusedCall& call) {
  const Layout layout = layout_of(call.codec, call.dtype);
  return std::max<std::uint64_t>(largest_chunk(call, layout), 1) * bytes_of_granule(call, layout);
}

bool sums(const FusedCall& call) {
  return std::any_of(call.programs.begin(), call.programs.end(), [](const Lowered& lowered) {
    const auto& all = lowered.program.instructions;
    return std::any_of(all.begin(), all.end(), [](const Instruction& each) { return each.op == Op::reduce; });
  });
}

bool reads_input(const FusedCall& call, int i) {
  const Program& program = call.programs[static_cast<std::size_t>(i)].program;
  const Layout layout = layout_of(call.codec, call.dtype);
  for (int chunk = 0; chunk < program.chunks; ++chunk) {
    if (program.reads_input[static_cast<std::size_t>(chunk)] && chunk_of(call, layout, chunk, program.chunks).numel) {
      return true;
    }
  }
  return false;
}

std::string why_no_steps(const FusedCall& call) {
  if (call.programs.size() != static_cast<std::size_t>(call.here)) return "programs: one for each rank that is here";
  if (call.steps < 1) return "steps: a program has at least one";
  const Layout layout = layout_of(call.codec, call.dtype);
  if (program_of(call).boxes.size() != static_cast<std::size_t>(call.ranks)) return "programs: of other ranks";
  if (!call.splits.empty() && program_of(call).chunks != call.ranks * call.ranks) {
    return "splits: need a chunk of each pair of ranks";
  }
  if (program_of(call).chunks > kMostChunks || program_of(call).max_boxes() > kMostBoxes) {
    return "programs: have more than " + std::to_string(kMostChunks) + " chunks, or " + std::to_string(kMostBoxes) +
           " boxes of a rank";
  }
  if (call.room.box_bytes < bytes_of_granule(call, layout)) {
    return "room: box_bytes must be " + std::to_string(bytes_of_granule(call, layout)) + " at least, got " +
           std::to_string(call.room.box_bytes);
  }
  for (int i = 0; i < call.here; ++i) {
    std::string reason = why_not_program(call, call.programs[static_cast<std::size_t>(i)], call.first + i);
    if (!reason.empty()) return reason;
  }
  return "";
}

std::vector<Step> plan_steps(const FusedCall& call) {
  const Layout layout = layout_of(call.codec, call.dtype);
  const std::uint64_t most = piece_of(call, layout);
  const std::uint64_t pieces = (largest_chunk(call, layout) + most - 1) / most;
  Step step = {};
  step.ranks = call.ranks;
  step.first = call.first;
  step.here = call.here;
  step.blocks = call.blocks;
  step.steps = static_cast<std::uint32_t>(call.steps);
  step.element_bytes = static_cast<std::uint32_t>(size_of(call.dtype));
  step.granule_elements = static_cast<std::uint32_t>(layout.granule);
  step.budget = call.budget;
  step.boxes_at = memory_bytes(call.room) - kPadBytes - call.room.box_bytes;
  step.box_stride = most * layout.bytes(layout.granule);
  step.sums_at = step.boxes_at + static_cast<std::uint64_t>(program_of(call).max_boxes()) * step.box_stride;
  step.sum_stride = most * layout.granule * sizeof(float);
  step.divisor = static_cast<float>(call.divisor);
  step.layout = layout;
  std::copy(call.peers, call.peers + call.ranks, step.peers);
  for (int i = 0; i < call.here; ++i) step.turns[i].call = whole_call(call, call.shares[i]);
  std::vector<Step> steps;
  steps.reserve(pieces * static_cast<std::size_t>(call.steps));  // they are large
  for (std::uint64_t piece = 0; piece < pieces; ++piece) {
    for (int s = 0; s < call.steps; ++s) {
      step.step = static_cast<std::uint32_t>(s);
      step.begins = s == 0;
      step.ends = s == call.steps - 1;
      bool idle = !step.begins && !step.ends;
      std::vector<Doings> ranks;
      for (int i = 0; i < call.here; ++i) {
        ranks.push_back(doings(call, layout, static_cast<std::size_t>(i), piece, s));
        idle &= ranks.back().idle();
      }
      if (!idle) add_launches(ranks, step, steps);
    }
  }
  return steps;
}

}  // namespace dtcomm::cuda
