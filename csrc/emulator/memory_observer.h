// MemoryObserver: the interface through which the emulator reports every access that orders memory. The race detector
// (csrc/tests/race_detector) implements it. Reported is what a CUDA device guarantees and no more; an exchange of
// registers within a warp, for example, orders no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dtcomm::emulator {

// The scope of a strong memory access in PTX's sense. Every rank is one device.
enum class Scope : unsigned { block, device, system };

class MemoryObserver {
 public:
  // How lanes are numbered: `threads` in a block, `blocks` in a rank.
  struct GridShape {
    unsigned lanes, threads, blocks;
  };

  virtual ~MemoryObserver() = default;

  // Begins a run, in which no lane is ordered before another. end() forgets what was known of memory.
  virtual void begin(const GridShape& shape) = 0;
  virtual void end() = 0;

  // Registers memory that lanes may use: read-only, or shared. Any other memory must be their own stack.
  virtual void constant(const void* at, std::size_t bytes) = 0;
  virtual void shared(const void* at, std::size_t bytes, const char* what, unsigned whose) = 0;
  // Registers memory that lanes of all ranks may store to, and only lanes of rank `whose` may load: what peers push.
  virtual void pushed(const void* at, std::size_t bytes, const char* what, unsigned whose) = 0;
  virtual void stacks(const char* at, std::size_t bytes_per_lane) = 0;

  // From enter() to leave() the program's accesses are those of a lane.
  virtual void enter(unsigned lane) = 0;
  virtual void leave() = 0;

  // These lanes have all reached a barrier that orders memory among them.
  virtual void barrier(const std::vector<unsigned>& lanes) = 0;

  // A strong store to `word`; and a strong load that read `value` or a value stored later.
  virtual void store(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool release, Scope scope) = 0;
  virtual void load(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool acquire, Scope scope) = 0;
};

}  // namespace dtcomm::emulator
