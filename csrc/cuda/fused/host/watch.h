// What an emulator of lanes tells whoever looks for races (csrc/tests/races): who runs, and what orders memory. It says
// what a device guarantees and no more: an exchange of registers within a warp, for one, orders no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dtcomm::cuda {

// Whom a strong access to memory reaches, as PTX has it: the thread block, the device (a rank has one), all.
enum class Scope : unsigned { block, device, system };

class Watch {
 public:
  // How lanes are numbered: `threads` of a block, `blocks` of a rank.
  struct Shape {
    unsigned lanes, threads, blocks;
  };

  virtual ~Watch() = default;

  // Lanes of a run, none of them before another; what was known of memory is forgotten when it ends.
  virtual void begin(const Shape& shape) = 0;
  virtual void end() = 0;

  // Memory that lanes may use: one that they may only read, or one that they share. Anything else is their own stack.
  virtual void constant(const void* at, std::size_t bytes) = 0;
  virtual void shared(const void* at, std::size_t bytes, const char* what, unsigned whose) = 0;
  virtual void stacks(const char* at, std::size_t bytes_of_lane) = 0;

  // What the program does from here on is a lane's doing; and no more.
  virtual void enter(unsigned lane) = 0;
  virtual void leave() = 0;

  // These lanes have all come to a barrier that orders memory among them.
  virtual void meet(const std::vector<unsigned>& lanes) = 0;

  // A strong store of a word, and a strong load that was good enough with `value` or whatever was stored later.
  virtual void store(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool release, Scope scope) = 0;
  virtual void load(unsigned lane, const std::uint32_t* word, std::uint32_t value, bool acquire, Scope scope) = 0;
};

}  // namespace dtcomm::cuda
