// Fused collectives as a caller states them. The same statement runs on a device (launch) and, for virtual ranks, on
// this CPU (host/emulator.h). No CUDA type appears here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "core/types.h"
#include "engine/program.h"

namespace dtcomm::cuda {

constexpr int kMostRanks = 8;         // of a host
constexpr unsigned kMostBlocks = 64;  // thread blocks of a rank
constexpr unsigned kStages = 5, kCounters = 3;

// Of a program it says how chunks lie in the tensors alone: a broadcast's as an all_reduce's, a gather's as an
// all_gather's.
enum class Collective : unsigned { all_reduce = 0, reduce_scatter = 1, all_gather = 2, all_to_all = 3 };

// two_shot: of all_reduce. one_shot: of every collective, the only direct one of the other three. program: a lowered
// schedule (ring, tree, ...), one kernel for each of its steps.
enum class Algorithm : unsigned { two_shot = 0, one_shot = 1, program = 2 };

// The part of a rank's memory that signals lie in; zero before the first call, and never written by hosts after that.
struct Pad {
  std::uint32_t missing;                                    // own: 0, or 1 + the rank that did not come in time
  std::uint32_t told;                                       // by a peer: 0, or 1 + the rank that it misses
  std::uint32_t signals[kStages][kMostBlocks][kMostRanks];  // the last index: who says so
  std::uint32_t epoch[kCounters][kMostBlocks];              // own: sections or steps that are over, of all calls
};
constexpr std::size_t kPadBytes = (sizeof(Pad) + 127) / 128 * 128;
constexpr std::size_t kMissingOffset = offsetof(Pad, missing);

// How the memory that peers reach is laid out; the same on all ranks, and for all calls on one memory, so that what one
// call still reads the next one does not write.
struct Room {
  int ranks = 2;
  unsigned blocks = 16;              // the most thread blocks of a call, up to kMostBlocks
  std::uint64_t slot_bytes = 32768;  // of one section's payload; a multiple of 16
  std::uint64_t box_bytes = 0;       // for the payloads of programs; 0: none run here
};

// Bytes that a rank makes reachable, aligned to 16 bytes: a pad, slots for the direct algorithms, room for boxes.
std::uint64_t memory_bytes(const Room& room);

// Room::box_bytes with which a program runs in one piece; with less it runs in several. Of a call that is complete but
// for its room.
struct FusedCall;
std::uint64_t box_bytes(const FusedCall& call);

// What others reach of a rank.
struct Peer {
  std::uint8_t* room;
  Pad* pad;
};

// Of memory that begins at `base`.
inline Peer peer_at(std::uint8_t* base) { return {base + kPadBytes, reinterpret_cast<Pad*>(base)}; }

// A rank's own tensors, contiguous and aligned to their elements. In a program, whose ranks may have a root, those that
// the rank neither reads nor wants may be missing, and a residual may be where others have none.
struct Share {
  const void* input = nullptr;
  void* output = nullptr;        // may be the input; with shards, may hold it at its place or lie in it at its place
  float* residual = nullptr;     // of the input's elements: added, and rewritten with what this rank's encodings lose
  const void* bias = nullptr;    // epilogue: output = (sum + bias[last dimension]) + addend, in fp32
  const void* addend = nullptr;  // of the output's elements; may be the output
};

// The program of a rank that is here, and the schedule's step of each of its instructions (schedule.lower.steps).
struct Lowered {
  Program program;
  std::vector<int> step_of;
};

// One collective, as the ranks `first` .. `first + here - 1` state it: one in a process of its own, all of them as
// virtual ranks. But for shares, programs, first and here it is the same on all ranks.
struct FusedCall {
  Collective collective = Collective::all_reduce;
  Algorithm algorithm = Algorithm::two_shot;
  Codec codec;
  DType dtype = DType::f32;  // f32, f16 or bf16; any where `none` is moved, not summed, and there is no residual
  std::size_t numel = 0;     // of the tensor in an all_reduce, otherwise of one shard
  std::vector<std::size_t>
      splits;                   // all_to_all of unequal shards: sender * ranks + receiver; numel does not matter then
  ReduceOp op = ReduceOp::sum;  // min and max: none, fp16, bf16
  std::size_t divisor = 1;      // of the sum: ranks for `avg`
  std::size_t features = 0;     // the last dimension, where shares have a bias
  bool encodes_own = false;     // two_shot: a rank's own contribution to its sum goes through the codec, too
  bool rounds = false;          // epilogue: the sum is rounded to the dtype before anything is added to it
  int ranks = 2, first = 0, here = 2;
  Room room;
  unsigned blocks = 1;                    // thread blocks of a rank
  std::uint32_t section = 0;              // granules of a chunk at a time, of a block or a program's piece; 0: as fit
  std::uint64_t budget = 10'000'000'000;  // nanoseconds that a kernel waits for one signal
  int steps = 0;                          // program: of the schedule
  bool keeps = true;                      // program: some rank keeps sums in fp32, for which all have room
  Peer peers[kMostRanks] = {};            // all ranks'
  Share shares[kMostRanks] = {};          // [i]: of rank first + i
  std::vector<Lowered> programs;          // [i]: of rank first + i
};

// Whether there are fused kernels for the codec: the first tier's, on blocks that a warp holds.
bool fusible(const Codec& codec, DType dtype);

// Empty, or why there is no kernel for the call, naming the field.
std::string why_not(const FusedCall& call);
// The same of a call without its shares.
std::string why_not_stated(const FusedCall& call);

// Queues it on `stream` (a cudaStream_t) of the current device: one cooperative kernel, or one for each step of a
// program, whose blocks all run at once or which is refused. Empty, or why nothing was queued. Which rank was missing
// stands in each rank's Pad::missing when the work is done; a memory where that is not 0 is of no more use: later calls
// of its rank do nothing.
std::string launch(const FusedCall& call, void* stream);

}  // namespace dtcomm::cuda
