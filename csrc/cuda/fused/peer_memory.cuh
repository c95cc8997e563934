// The arguments of fused kernels, the memory that the threads of a block share, and DeviceBlock: signals between ranks
// that write into each other's memory. Thread block b of a rank works only with thread block b of the other ranks, so
// the blocks are independent pipelines.
//
// A signal is a number that only grows: section e of a block has reached a stage when the signal is e or more. Nothing
// is ever reset, so a launch can be captured in a graph: a block keeps its count in the pad of its rank.
#pragma once

#include "cuda/fused/collective.h"
#include "cuda/params.cuh"

namespace dtcomm::cuda {

// Threads of a thread block, and blocks that a multiprocessor must have registers for: 80 a thread. With 512 threads
// and 64 registers, sums of eight ranks took 12 % longer on an H100.
constexpr unsigned kFusedThreads = 384;
constexpr unsigned kBlocksPerMultiprocessor = 2;

// The stages that signals announce: scattered and gathered in two_shot, shot in one_shot.
enum class SignalStage : unsigned { scattered = 0, gathered = 1, shot = 2 };

// The passes of a rank over its tensors: encoding for peers, decoding from peers, and its own sum.
enum class Pass : unsigned { encode = 0, decode = 1, reduce = 2 };
constexpr unsigned kPasses = 3;

// A rank's tensors, as the parameters of each pass over all of them, and its epilogue.
struct RankState {
  KernelParams params[kPasses];
  const void* bias;
  const void* addend;  // [elements of the output]
};

// The barriers of a block, named after the accesses that they order. Tests leave them out one by one.
enum class BarrierId : unsigned {
  pointers_set,       // all parameters point at this section, before any thread uses them
  payloads_stored,    // payloads are in peers' memory, before one thread signals the peers
  payloads_arrived,   // one thread has seen the peers' signals, before all read what the peers sent
  sum_encoded,        // all of the encoded sum is stored, before it is copied to peers
  payloads_pushed,    // copies are in peers' memory, before one thread signals the peers
  payloads_gathered,  // one thread has seen the peers' signals, before all read their copies
  section_done,       // the section has been read, before its parameters point at the next one
};

// The arguments of a kernel. The launch contains the ranks from first_rank to first_rank + local_ranks - 1: one in a
// process of its own, or all of them as virtual ranks.
struct FusedParams {
  Collective collective;
  Algorithm algorithm;
  int ranks, first_rank, local_ranks;
  unsigned blocks;                // of a rank
  unsigned slot_stride;           // blocks that the peer buffer has slots for
  std::uint32_t section;          // granules of a chunk (in one_shot: of the tensor) that a block processes at a time
  std::uint32_t sections;         // of the largest chunk
  std::uint32_t largest_section;  // elements of the largest section of a chunk
  std::uint64_t granules;         // of the tensor
  std::uint64_t numel;            // of the tensor, or of a shard
  std::uint64_t slot_bytes;       // of a section's payload
  std::uint64_t timeout_ns;       // of one wait
  std::uint64_t features;         // of the epilogue
  std::uint32_t element_bytes, granule_elements;
  bool has_epilogue;  // there is an epilogue
  bool rounds_sum;    // rounds the sum before the epilogue adds to it
  bool verbatim;      // payloads are the elements' bytes
  // What the collective does in a section. The host says so, as what a kernel computes once takes a register
  // everywhere.
  bool scatters;                      // each peer gets a payload of its own; else all get the same
  bool sums_last;                     // a section ends with the sum, and not with decoding
  bool keeps_own;                     // a rank copies its shard for itself
  unsigned first_sent, sent;          // distances to the ranks whose payloads are encoded: the first, how many
  unsigned first_received, received;  // the same for those that are decoded at the end
  bool uneven;                        // shard sizes are splits[sender * ranks + receiver]
  Layout layout;
  PeerPointers peers[kMaxRanks];
  RankState states[kMaxRanks];
  std::uint64_t splits[kMaxRanks * kMaxRanks];
};
static_assert(sizeof(FusedParams) < 16384, "fits the arguments of a kernel, with the family");

// The shared memory of a block.
struct Shared {
  // The current section of each pass: encoding for each peer (in one_shot the own payload goes to all), decoding from
  // each peer, and one sum.
  KernelParams params[kPasses][kMaxRanks];
  std::uint32_t missing_before;  // SignalPad::missing_rank when the block began
  std::uint32_t missing_rank;    // 0, or 1 + a rank that did not come since

  DTCOMM_DEVICE KernelParams& encode(int peer) { return params[static_cast<unsigned>(Pass::encode)][peer]; }
  DTCOMM_DEVICE KernelParams& decode(int peer) { return params[static_cast<unsigned>(Pass::decode)][peer]; }
  DTCOMM_DEVICE KernelParams& reduce() { return params[static_cast<unsigned>(Pass::reduce)][0]; }
};

#if defined(__CUDACC__)

// A thread block of a device. A barrier of the block makes everything before it visible to everything after it, so that
// one thread's release and one thread's acquire serve the whole block.
struct DeviceBlock : WarpLanes {
  Shared& shared_;

  __device__ __forceinline__ explicit DeviceBlock(Shared& shared) : shared_(shared) {}
  __device__ __forceinline__ Shared& shared() const { return shared_; }
  __device__ __forceinline__ void sync_block(BarrierId) const { __syncthreads(); }
  __device__ __forceinline__ unsigned slot_parity(std::uint32_t epoch) const { return epoch & 1; }

  // For words that several threads may write at once and other blocks read.
  __device__ __forceinline__ void store_relaxed(std::uint32_t* word, std::uint32_t value) const {
    asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  }
  __device__ __forceinline__ void signal(std::uint32_t* word, std::uint32_t epoch) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(epoch) : "memory");
  }
  __device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* word) const {
    std::uint32_t seen;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
    return seen;
  }
  // False where the signal did not come within `timeout_ns` nanoseconds.
  __device__ __forceinline__ bool wait(const std::uint32_t* word, std::uint32_t epoch, std::uint64_t timeout_ns) const {
    std::uint64_t begin = 0;
    for (;;) {
      if (static_cast<std::int32_t>(load_acquire(word) - epoch) >= 0) return true;
      std::uint64_t now;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (begin == 0) begin = now;
      if (now - begin > timeout_ns) return false;
    }
  }
};

#endif

}  // namespace dtcomm::cuda
