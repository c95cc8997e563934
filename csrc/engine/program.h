// A lowered program: the instructions of one rank for one schedule. dtcomm/schedule/lower.py defines what each
// instruction means and how a program is flattened into integers.
#pragma once

#include <cstdint>
#include <vector>

namespace dtcomm {

// encode: own input into an own box. send, receive: publish an own box, wait for a peer's. reduce: sum boxes and local
// terms. decode: a peer's box into the output. forward: a peer's box into an own box. copy: own input into the output.
enum class Op : std::uint8_t { encode = 1, send = 2, receive = 3, reduce = 4, decode = 5, forward = 6, copy = 7 };
// The local term of a reduce.
enum class Local : std::uint8_t { none = 0, input = 1, accumulator = 2 };

struct BoxRef {
  int rank;
  int box;
  int level;
};

struct Instruction {
  Op op;
  int chunk = 0;
  int box = -1;                   // encode, send, reduce (or -1), forward: own box; receive, decode: the peer's
  int peer = -1;                  // receive, decode, forward
  int source = -1;                // forward: the peer's box
  int level = 0;                  // of the box: 0 inside the hosts, more between them
  Local local = Local::none;      // reduce
  int position = 0;               // reduce: of the local term among the inputs, in rank order
  bool output = false;            // encode, reduce: also write the result to the output
  bool keep_partial_sum = false;  // reduce: keep the sum, unencoded, for a later instruction
  bool divide = false;            // reduce: this is the last sum of an average
  bool reads_residual = false;    // this instruction reads the input and adds the residual to it
  bool writes_residual = false;   // this instruction writes the chunk's residual: the error of its encoding, or zero
  std::vector<BoxRef> inputs;     // reduce
  std::vector<int> peers;         // send
};

struct Program {
  int rank = 0;
  int ranks = 1;
  int chunks = 1;
  std::vector<int> boxes;  // per rank
  std::vector<Instruction> instructions;
  bool accumulates = false;         // some sum is kept unencoded
  std::vector<int> outputs;         // chunks that have an output at this rank, one entry for each write
  std::vector<bool> handles_chunk;  // by chunk: some instruction is about it
  std::vector<bool> reads_input;    // by chunk: this rank reads its own input of it
  std::vector<bool> sends_to;       // by rank
  std::vector<bool> receives_from;  // by rank
  bool sends_sums = false;          // this rank sends on sums of its own making

  // Whether a rank publishes anything of its own.
  bool publishes(int peer) const { return boxes[static_cast<std::size_t>(peer)] > 0; }
  int max_boxes() const;
  // Whether every chunk's output is written by exactly one instruction.
  bool writes_chunks_once() const;

  // Parses a flattened program and checks every operand, so that the interpreter need not. Throws
  // std::invalid_argument.
  static Program parse(int rank, int ranks, int chunks, std::vector<int> boxes, const std::vector<std::int64_t>& flat);
};

}  // namespace dtcomm
