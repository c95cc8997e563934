#include "engine/program.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace dtcomm {
namespace {

// Reads the operands of one instruction.
class OperandReader {
 public:
  OperandReader(const std::vector<std::int64_t>& flat, std::size_t at, std::size_t end)
      : flat_(flat), at_(at), end_(end) {}

  int next(std::int64_t low, std::int64_t high, const char* what) {
    if (at_ >= end_) throw std::invalid_argument(std::string("program: missing operand ") + what);
    const std::int64_t value = flat_[at_++];
    if (value < low || value >= high) {
      throw std::invalid_argument(std::string("program: ") + what + " " + std::to_string(value) + " is not in [" +
                                  std::to_string(low) + ", " + std::to_string(high) + ")");
    }
    return static_cast<int>(value);
  }
  bool more() const { return at_ < end_; }

 private:
  const std::vector<std::int64_t>& flat_;
  std::size_t at_;
  std::size_t end_;
};

// The residual belongs to the rank's own contribution: it is added where the input is read. The chunk's encoding writes
// the new one; if the contribution is sent unencoded, it becomes zero.
void mark_residuals(Program& program) {
  for (int chunk = 0; chunk < program.chunks; ++chunk) {
    Instruction* reader = nullptr;
    Instruction* encoder = nullptr;
    for (Instruction& instruction : program.instructions) {
      if (instruction.chunk != chunk) continue;
      const bool input =
          instruction.op == Op::encode || (instruction.op == Op::reduce && instruction.local == Local::input);
      const bool encoding = instruction.op == Op::encode || (instruction.op == Op::reduce && instruction.box >= 0);
      if (input && !reader) reader = &instruction;
      if (encoding && !encoder) encoder = &instruction;
    }
    if (!reader) continue;
    reader->reads_residual = true;
    (encoder ? encoder : reader)->writes_residual = true;
  }
}

}  // namespace

int Program::max_boxes() const { return boxes.empty() ? 0 : *std::max_element(boxes.begin(), boxes.end()); }

bool Program::writes_chunks_once() const {
  std::vector<int> sorted = outputs;
  std::sort(sorted.begin(), sorted.end());
  return static_cast<int>(sorted.size()) == chunks && std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

Program Program::parse(int rank, int ranks, int chunks, std::vector<int> boxes, const std::vector<std::int64_t>& flat) {
  if (ranks < 1 || rank < 0 || rank >= ranks) throw std::invalid_argument("program: rank outside the group");
  if (chunks < 1) throw std::invalid_argument("program: a program has at least one chunk");
  if (boxes.size() != static_cast<std::size_t>(ranks)) {
    throw std::invalid_argument("program: boxes must have one count per rank");
  }
  for (const int count : boxes) {
    if (count < 0 || count > (1 << 16)) throw std::invalid_argument("program: box count out of range");
  }
  Program program;
  program.rank = rank;
  program.ranks = ranks;
  program.chunks = chunks;
  program.boxes = boxes;
  program.handles_chunk.assign(static_cast<std::size_t>(chunks), false);
  program.reads_input.assign(static_cast<std::size_t>(chunks), false);
  program.sends_to.assign(static_cast<std::size_t>(ranks), false);
  program.receives_from.assign(static_cast<std::size_t>(ranks), false);
  const auto own_boxes = boxes[static_cast<std::size_t>(rank)];
  const auto box_of = [&](OperandReader& reader, int peer, const char* what) {
    return reader.next(0, boxes[static_cast<std::size_t>(peer)], what);
  };
  constexpr int kLevels = 8;  // of a hierarchy
  std::size_t at = 0;
  while (at < flat.size()) {
    if (at + 3 > flat.size()) throw std::invalid_argument("program: truncated instruction");
    Instruction instruction;
    const std::int64_t code = flat[at];
    if (code < 1 || code > 7) throw std::invalid_argument("program: unknown instruction " + std::to_string(code));
    instruction.op = static_cast<Op>(code);
    if (flat[at + 1] < 0 || flat[at + 1] >= chunks) throw std::invalid_argument("program: chunk out of range");
    instruction.chunk = static_cast<int>(flat[at + 1]);
    program.handles_chunk[static_cast<std::size_t>(instruction.chunk)] = true;
    const std::int64_t length = flat[at + 2];
    if (length < 0 || static_cast<std::size_t>(length) > flat.size() - at - 3) {
      throw std::invalid_argument("program: truncated instruction");
    }
    OperandReader reader(flat, at + 3, at + 3 + static_cast<std::size_t>(length));
    at += 3 + static_cast<std::size_t>(length);
    switch (instruction.op) {
      case Op::encode:
        instruction.box = reader.next(0, own_boxes, "box");
        instruction.output = reader.next(0, 2, "output") != 0;
        instruction.level = reader.next(0, kLevels, "level");
        break;
      case Op::send:
        instruction.box = reader.next(0, own_boxes, "box");
        instruction.level = reader.next(0, kLevels, "level");
        while (reader.more()) instruction.peers.push_back(reader.next(0, ranks, "peer"));
        break;
      case Op::receive:
      case Op::decode:
        instruction.peer = reader.next(0, ranks, "peer");
        instruction.box = box_of(reader, instruction.peer, "box");
        instruction.level = reader.next(0, kLevels, "level");
        break;
      case Op::forward:
        instruction.peer = reader.next(0, ranks, "peer");
        instruction.source = box_of(reader, instruction.peer, "source");
        instruction.box = reader.next(0, own_boxes, "box");
        instruction.level = reader.next(0, kLevels, "level");
        break;
      case Op::copy:
        break;
      case Op::reduce: {
        instruction.local = static_cast<Local>(reader.next(0, 3, "local"));
        instruction.position = reader.next(0, ranks + 1, "position");
        instruction.box = reader.next(-1, own_boxes, "box");
        instruction.output = reader.next(0, 2, "output") != 0;
        instruction.keep_partial_sum = reader.next(0, 2, "keep") != 0;
        instruction.divide = reader.next(0, 2, "divide") != 0;
        instruction.level = reader.next(0, kLevels, "level");
        const int count = reader.next(0, ranks + 1, "input count");
        if (instruction.position > count) throw std::invalid_argument("program: position beyond the inputs");
        for (int i = 0; i < count; ++i) {
          BoxRef input{};
          input.rank = reader.next(0, ranks, "input rank");
          input.box = box_of(reader, input.rank, "input box");
          input.level = reader.next(0, kLevels, "input level");
          instruction.inputs.push_back(input);
        }
        if (instruction.keep_partial_sum && (instruction.box >= 0 || instruction.output)) {
          throw std::invalid_argument("program: a sum is kept, or encoded or written out, not both");
        }
        break;
      }
    }
    if (reader.more()) throw std::invalid_argument("program: instruction with too many operands");
    if (instruction.op == Op::encode || instruction.op == Op::copy || instruction.local == Local::input) {
      program.reads_input[static_cast<std::size_t>(instruction.chunk)] = true;
    }
    if (instruction.op == Op::receive) program.receives_from[static_cast<std::size_t>(instruction.peer)] = true;
    for (const int peer : instruction.peers) program.sends_to[static_cast<std::size_t>(peer)] = true;
    program.sends_sums |= instruction.op == Op::reduce && instruction.box >= 0;
    program.accumulates |= instruction.keep_partial_sum || instruction.local == Local::accumulator;
    if (instruction.output || instruction.op == Op::decode || instruction.op == Op::copy) {
      program.outputs.push_back(instruction.chunk);
    }
    program.instructions.push_back(std::move(instruction));
  }
  mark_residuals(program);
  return program;
}

}  // namespace dtcomm
