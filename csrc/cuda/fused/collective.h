// Fused collectives as a caller specifies them. The same specification runs on a device (launch) and, for virtual
// ranks, on this CPU (csrc/emulator). No CUDA type appears here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "core/status.h"
#include "core/types.h"

namespace dtcomm::cuda {

constexpr int kMaxRanks = 8;                // of a host
constexpr unsigned kMaxThreadBlocks = 160;  // thread blocks of a rank; GPUs of 2026 have up to 148 multiprocessors
constexpr unsigned kSignalStages = 3, kCounters = 2;

enum class Collective : unsigned { all_reduce = 0, reduce_scatter = 1, all_gather = 2, all_to_all = 3 };

// two_shot serves all_reduce. one_shot serves every collective and is the only algorithm of the other three.
enum class Algorithm : unsigned { two_shot = 0, one_shot = 1 };

// The part of a rank's reachable memory that signals lie in. It begins as zeros; hosts never write it after that.
struct SignalPad {
  std::uint32_t missing_rank;  // written by this rank: 0, or 1 + the rank that did not come in time
  std::uint32_t signals[kSignalStages][kMaxThreadBlocks][kMaxRanks];  // the last index is the rank that signals
  std::uint32_t epoch[kCounters][kMaxThreadBlocks];  // written by this rank: sections completed, over all calls
};
constexpr std::size_t kPadBytes = (sizeof(SignalPad) + 127) / 128 * 128;
constexpr std::size_t kMissingOffset = offsetof(SignalPad, missing_rank);

// How the memory that peers reach is laid out. The same on all ranks, and for all calls that use the memory, so that a
// call does not write what the previous one still reads.
struct PeerBufferLayout {
  int ranks = 2;
  unsigned blocks = 16;              // the most thread blocks of a call, up to kMaxThreadBlocks
  std::uint64_t slot_bytes = 32768;  // for one section's payload; a multiple of 16
};

// Bytes that a rank makes reachable, aligned to 16 bytes: a signal pad and slots.
std::uint64_t memory_bytes(const PeerBufferLayout& layout);

// The reachable memory of one rank.
struct PeerPointers {
  std::uint8_t* buffer;
  SignalPad* pad;
};

// The pointers into memory that begins at `base`.
inline PeerPointers peer_at(std::uint8_t* base) { return {base + kPadBytes, reinterpret_cast<SignalPad*>(base)}; }

// A rank's own tensors, contiguous and aligned to their elements.
struct RankTensors {
  const void* input = nullptr;
  void* output = nullptr;        // may be the input; with shards, may contain it or lie in it at its place
  float* residual = nullptr;     // [elements of the input]: added, and overwritten with this rank's encoding errors
  const void* bias = nullptr;    // epilogue: output = (sum + bias[last dimension]) + addend, in fp32
  const void* addend = nullptr;  // [elements of the output]; may be the output
};

// The tensors of one launch.
struct LaunchTensors {
  RankTensors ranks[kMaxRanks];  // [i]: of rank first_rank + i
  std::size_t features = 0;      // the last dimension of the output, where there is a bias
};

// A collective without its tensors, as specified by the ranks first_rank .. first_rank + local_ranks - 1: one in a
// process of its own, or all of them as virtual ranks. All other fields are the same on all ranks.
struct FusedSpec {
  Collective collective = Collective::all_reduce;
  Algorithm algorithm = Algorithm::two_shot;
  Codec codec;
  DType dtype = DType::f32;         // f32, f16 or bf16; any type where `none` only moves elements, without a residual
  std::size_t numel = 0;            // of the tensor in an all_reduce, otherwise of one shard
  std::vector<std::size_t> splits;  // all_to_all of unequal shards: sender * ranks + receiver; numel is ignored then
  ReduceOp op = ReduceOp::sum;      // min and max: with none, fp16 and bf16
  std::size_t divisor = 1;          // of the sum: ranks for `avg`
  bool encodes_own = false;         // two_shot: a rank's own contribution to its sum is encoded, too
  bool rounds_sum = false;          // the sum is rounded to the dtype before the epilogue adds to it
  int ranks = 2, first_rank = 0, local_ranks = 2;
  PeerBufferLayout buffer_layout;
  unsigned blocks = 1;                        // thread blocks of a rank
  std::uint32_t section = 0;                  // granules of a chunk per section; 0: as many as fit
  std::uint64_t timeout_ns = 10'000'000'000;  // how long a kernel waits for one signal
  PeerPointers peers[kMaxRanks] = {};         // of all ranks
};

// Whether there are fused kernels for the codec: those of the first tier, with blocks that a warp holds.
bool fusible(const Codec& codec, DType dtype);

class FusedPlan;  // cuda/fused/plan.h

// Queues a planned collective on `stream` (a cudaStream_t) of the current device: one cooperative kernel, whose
// blocks run at once, or it is refused. An error holds CUDA's
// reason why a kernel was not queued. When the work is done, SignalPad::missing_rank of each rank names the missing
// rank; while it is not 0, later calls of that rank do nothing.
Status launch(FusedPlan& plan, const LaunchTensors& tensors, void* stream);

}  // namespace dtcomm::cuda
