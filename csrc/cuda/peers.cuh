// What the ranks of a fused collective see of each other: memory that peers write into, and signals. Thread block b of
// a rank works with the thread blocks b of the others alone, so blocks are pipelines beside each other.
//
// A signal is a number that only grows: section e of a block has come to a point when the signal is e or more. So
// nothing is ever reset, and a launch may be captured in a graph: how far a block has counted lies in its own pad.
#pragma once

#include "cuda/call.cuh"

namespace dtcomm::cuda {

constexpr int kMostRanks = 8;            // of a host
constexpr unsigned kMostBlocks = 64;     // thread blocks of a rank
constexpr unsigned kFusedThreads = 256;  // of a thread block
constexpr unsigned kFusedBlocks = 2;     // that a multiprocessor has registers for: they wait more than they compute

enum class Stage : unsigned { scattered = 0, gathered = 1, shot = 2 };
enum class Algorithm : unsigned { two_shot = 0, one_shot = 1 };
constexpr unsigned kStages = 3, kAlgorithms = 2;

// Of one rank. Zero at first.
struct Pad {
  std::uint32_t signals[kStages][kMostBlocks][kMostRanks];  // the last index: who says so
  std::uint32_t epoch[kAlgorithms][kMostBlocks];            // own: sections that are over, of all calls
  std::uint32_t missing;                                    // own: 0, or 1 + the rank that did not come in time
};

// What others reach of a rank.
struct Peer {
  std::uint8_t* room;  // room_bytes() of it
  Pad* pad;
};

// What a rank does to its own tensors: the calls over all of them, as plan() makes them.
struct Seat {
  Call encode, reduce, decode;
};

// Points at which all threads of a block meet. Each stands for what goes wrong without it.
enum class Point : unsigned {
  aimed,     // calls point at this section
  stored,    // what goes to peers is there, before they are told
  arrived,   // peers have told, before what they sent is read
  reduced,   // the encoded sum is there, before it is copied
  pushed,    // peers have it, before they are told
  gathered,  // peers have told
  done,      // the section is read, before its calls point at the next one
};

// One launch. Ranks first .. first + here - 1 are in it: one in a process of its own, all of them as virtual ranks.
struct Fused {
  int ranks, first, here;
  unsigned blocks;           // of a rank
  std::uint32_t section;     // granules of a chunk (of the tensor, in one shot) that a block takes at a time
  std::uint32_t sections;    // of the largest chunk
  std::uint64_t granules;    // of the tensor
  std::uint64_t slot_bytes;  // of a section's payload
  std::uint32_t element_bytes, granule_elements;
  std::uint64_t budget;  // of one wait, nanoseconds
  Peer peers[kMostRanks];
  Seat seats[kMostRanks];
};

// Of a rank: inbox and outbox of two_shot, and two halves of one_shot's, a slot for each block and rank.
inline std::uint64_t room_bytes(const Fused& fused) {
  return std::uint64_t{4} * fused.blocks * static_cast<unsigned>(fused.ranks) * fused.slot_bytes;
}

// What a block's threads share.
struct Shared {
  Call encode[kMostRanks];  // of the chunk that goes to a peer; in one shot the own one goes to all
  Call reduce;
  Call decode[kMostRanks];
  std::uint32_t missing;
};

#if defined(__CUDACC__)

// A thread block of a device. Its lanes are a warp's; what follows a barrier of the block has seen what came before
// it, so that one thread's release and acquire serve them all.
struct DeviceBlock : WarpLanes {
  Shared& shared_;

  __device__ __forceinline__ explicit DeviceBlock(Shared& shared) : shared_(shared) {}
  __device__ __forceinline__ Shared& shared() const { return shared_; }
  __device__ __forceinline__ void meet(Point) const { __syncthreads(); }
  __device__ __forceinline__ unsigned half(std::uint32_t epoch) const { return epoch & 1; }

  __device__ __forceinline__ void signal(std::uint32_t* word, std::uint32_t epoch) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(epoch) : "memory");
  }
  // False where the signal did not come within `budget` nanoseconds.
  __device__ __forceinline__ bool wait(const std::uint32_t* word, std::uint32_t epoch, std::uint64_t budget) const {
    std::uint64_t begin = 0;
    for (;;) {
      std::uint32_t seen;
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
      if (static_cast<std::int32_t>(seen - epoch) >= 0) return true;
      std::uint64_t now;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (begin == 0) begin = now;
      if (now - begin > budget) return false;
    }
  }
};

#endif

}  // namespace dtcomm::cuda
