// What the ranks of a fused collective see of each other: memory that peers write into, and signals. Thread block b of
// a rank works with the thread blocks b of the others alone, so blocks are pipelines beside each other.
//
// A signal is a number that only grows: section e of a block has come to a point when the signal is e or more. So
// nothing is ever reset, and a launch may be captured in a graph: how far a block has counted lies in its own pad.
#pragma once

#include "cuda/fused/collective.h"
#include "cuda/params.cuh"

namespace dtcomm::cuda {

constexpr unsigned kFusedThreads = 256;  // of a thread block
constexpr unsigned kBlocksPerMultiprocessor =
    2;  // that a multiprocessor has registers for: they wait more than they compute

// What a signal says: of two_shot, of the collectives in one shot, and of programs.
enum class SignalStage : unsigned { scattered = 0, gathered = 1, shot = 2, entered = 3, stepped = 4 };

// Calls of a rank: to what goes to others, to what comes from them, and to its sum.
enum class Pass : unsigned { encode = 0, decode = 1, reduce = 2 };
constexpr unsigned kPasses = 3;

// What a rank does to its own tensors: the calls over all of them, as plan() makes them.
struct RankState {
  KernelParams params[kPasses];
  const void* bias;    // of the epilogue, which is in the last of the calls
  const void* addend;  // in the output's place
};

// Points at which all threads of a block meet. Each stands for what goes wrong without it.
enum class BarrierId : unsigned {
  pointers_set,       // all parameters point at this section, before any thread uses them
  payloads_stored,    // payloads are in peers' memory, before one thread signals the peers
  payloads_arrived,   // one thread has seen the peers' signals, before all read what the peers sent
  sum_encoded,        // all of the encoded sum is stored, before it is copied to peers
  payloads_pushed,    // copies are in peers' memory, before one thread signals the peers
  payloads_gathered,  // one thread has seen the peers' signals, before all read their copies
  peers_entered,      // all peers have begun this call, before memory that they read in the last one is written
  section_done,       // the section has been read, before its parameters point at the next one
};

// One launch. Ranks first .. first + here - 1 are in it: one in a process of its own, all of them as virtual ranks.
struct FusedParams {
  Collective collective;
  Algorithm algorithm;
  int ranks, first_rank, local_ranks;
  unsigned blocks;           // of a rank
  unsigned slot_stride;      // blocks that the room has slots for
  std::uint32_t section;     // granules of a chunk (of the tensor, in one shot) that a block takes at a time
  std::uint32_t sections;    // of the largest chunk
  std::uint64_t granules;    // of the tensor
  std::uint64_t numel;       // of the tensor, or of a shard
  std::uint64_t slot_bytes;  // of a section's payload
  std::uint64_t timeout_ns;  // of one wait, nanoseconds
  std::uint64_t features;    // of the epilogue
  std::uint32_t element_bytes, granule_elements;
  bool feedback;      // there are residuals
  bool has_epilogue;  // there is an epilogue
  bool encodes_own;   // two_shot: the owner's contribution, too
  bool rounds_sum;    // the sum, before the epilogue adds to it
  bool verbatim;      // payloads are the elements' bytes
  bool uneven;        // shards are as large as `splits` says: sender * ranks + receiver
  Layout layout;
  PeerPointers peers[kMaxRanks];
  RankState states[kMaxRanks];
  std::uint64_t splits[kMaxRanks * kMaxRanks];
};
static_assert(sizeof(FusedParams) < 16384, "an argument of a kernel, beside the family");

// What a block's threads share.
struct Shared {
  KernelParams params[kPasses]
                     [kMaxRanks];  // of what goes to a peer (in one shot the own one goes to all) and comes from it
  std::uint32_t missing_before;    // what the rank's pad said of missing ranks when the block began
  std::uint32_t missing_rank;      // who did not come since

  DTCOMM_DEVICE KernelParams& encode(int peer) { return params[static_cast<unsigned>(Pass::encode)][peer]; }
  DTCOMM_DEVICE KernelParams& decode(int peer) { return params[static_cast<unsigned>(Pass::decode)][peer]; }
  DTCOMM_DEVICE KernelParams& reduce() { return params[static_cast<unsigned>(Pass::reduce)][0]; }
};

#if defined(__CUDACC__)

// A thread block of a device. Its lanes are a warp's; what follows a barrier of the block has seen what came before
// it, so that one thread's release and acquire serve them all.
struct DeviceBlock : WarpLanes {
  Shared& shared_;

  __device__ __forceinline__ explicit DeviceBlock(Shared& shared) : shared_(shared) {}
  __device__ __forceinline__ Shared& shared() const { return shared_; }
  __device__ __forceinline__ void sync_block(BarrierId) const { __syncthreads(); }
  __device__ __forceinline__ unsigned slot_parity(std::uint32_t epoch) const { return epoch & 1; }

  // What several threads may write at once, and blocks look at.
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
  // False where the signal did not come within `budget` nanoseconds.
  __device__ __forceinline__ bool wait(const std::uint32_t* word, std::uint32_t epoch, std::uint64_t timeout_ns) const {
    std::uint64_t begin = 0;
    for (;;) {
      if (static_cast<std::int32_t>(look(word) - epoch) >= 0) return true;
      std::uint64_t now;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (begin == 0) begin = now;
      if (now - begin > timeout_ns) return false;
    }
  }
};

#endif

}  // namespace dtcomm::cuda
