// A lowered program as the engine runs it: dtcomm/schedule/program.py says what each instruction means and how it
// is flattened.
#pragma once

#include <cstdint>
#include <vector>

namespace dtcomm {

enum class Op : std::uint8_t { encode = 1, send = 2, receive = 3, reduce = 4, decode = 5, forward = 6, copy = 7 };
enum class Local : std::uint8_t { none = 0, input = 1, accumulator = 2 };

struct BoxRef {
  int rank;
  int box;
  int level;
};

struct Instruction {
  Op op;
  int chunk = 0;
  int box = -1;     // encode, send, reduce (or -1), forward: own box; receive, adopt: the peer's
  int peer = -1;    // receive, adopt, forward
  int source = -1;  // forward: the peer's box
  int level = 0;    // of the box: 0 inside the hosts, more between them
  Local local = Local::none;
  int position = 0;
  bool output = false;
  bool keep = false;
  bool divide = false;
  bool reads_residual = false;   // this instruction reads the input: the residual joins it here
  bool writes_residual = false;  // this instruction settles the chunk's residual: the encoding's error, or zero
  std::vector<BoxRef> inputs;    // reduce
  std::vector<int> peers;        // send
};

struct Program {
  int rank = 0;
  int ranks = 1;
  int chunks = 1;
  std::vector<int> boxes;  // per rank
  std::vector<Instruction> instructions;
  bool accumulates = false;
  std::vector<int> outputs;         // chunks that have an output at this rank
  std::vector<bool> reads_input;    // by chunk: this rank reads its own input of it
  std::vector<bool> sends_to;       // by rank: this rank sends it something
  std::vector<bool> receives_from;  // by rank: this rank receives something from it
  bool sends_sums = false;          // a rank sends on sums of its own making

  // Whether a rank hands anything of its own to others.
  bool publishes(int peer) const { return boxes[static_cast<std::size_t>(peer)] > 0; }

  int max_boxes() const;

  // Whether every chunk's output is written by one instruction.
  bool writes_chunks_once() const;

  // Parses and checks every operand, so that the interpreter need not: std::invalid_argument says what is wrong.
  static Program parse(int rank, int ranks, int chunks, std::vector<int> boxes, const std::vector<std::int64_t>& flat);
};

}  // namespace dtcomm
