// Fibers: many threads of execution on one CPU thread. Each fiber runs on a stack of its own until it switches to
// another one. The first switch to a fiber is a setcontext; all others are longjmps, which need no system call.
#pragma once

#include <setjmp.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace dtcomm::emulator {

class Fibers {
 public:
  static constexpr unsigned kNone = ~0U;
  static constexpr std::size_t kStackBytes = 64 << 10;

  explicit Fibers(unsigned capacity) : fibers_(capacity), stacks_(new char[capacity * kStackBytes]) {}

  // Runs body(fiber) for fibers 0 .. count - 1, beginning with `first`. When one ends, next(fiber) names the fiber that
  // continues; kNone ends the run.
  void run(unsigned count, unsigned first, const std::function<void(unsigned)>& body,
           const std::function<unsigned(unsigned)>& next);

  unsigned current() const { return current_; }
  const char* stacks() const { return stacks_.get(); }  // kStackBytes of each fiber, fiber 0 first

  // Ends run() from within a fiber. The other fibers never continue, so they must own nothing.
  [[noreturn]] void abandon();

  // Continues fiber `to`. Returns when another fiber switches back to the caller.
  void switch_to(unsigned to);

 private:
  struct Fiber {
    bool started = false;
    jmp_buf state;
  };

  static void entry();
  static Fibers*& active();
  [[noreturn]] void end_fiber();
  [[noreturn]] void resume_current();
  [[noreturn]] void start_fiber(unsigned fiber);
  void start_switch(const void* stack, std::size_t size);
  void finish_switch();

  std::vector<Fiber> fibers_;
  std::unique_ptr<char[]> stacks_;
  jmp_buf home_;
  const void* home_stack_ = nullptr;
  std::size_t home_size_ = 0;
  unsigned current_ = 0;
  const std::function<void(unsigned)>* body_ = nullptr;
  const std::function<unsigned(unsigned)>* next_ = nullptr;
};

}  // namespace dtcomm::emulator
