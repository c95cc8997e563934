// Many threads of execution on one: each runs on a stack of its own until it hands on to another.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace dtcomm::cuda {

// The first switch to a lane is a setcontext; all others are longjmps, which cost no system call.
class Stacks {
 public:
  static constexpr unsigned kNobody = ~0U;
  static constexpr std::size_t kStack = 64 << 10;

  explicit Stacks(unsigned most) : lanes_(most), stacks_(new char[most * kStack]) {}

  // body(lane) for lanes 0 .. count - 1, beginning with `first`; when one ends, after(lane) says who goes on. Returns
  // when that is kNobody.
  void run(unsigned count, unsigned first, const std::function<void(unsigned)>& body,
           const std::function<unsigned(unsigned)>& after) {
    body_ = &body;
    after_ = &after;
    for (unsigned lane = 0; lane < count; ++lane) lanes_[lane].started = false;
    current_ = first;
    if (_setjmp(home_) == 0) enter(first);
    arrive();
  }

  unsigned current() const { return current_; }
  const char* memory() const { return stacks_.get(); }  // kStack bytes of each lane, lane 0 first

  // Ends run() from a lane; the others never go on, so they must own nothing.
  [[noreturn]] void abandon() {
    leave_for(home_stack_, home_size_);
    _longjmp(home_, 1);
  }

  // Returns when somebody hands on to the one that called it.
  __attribute__((noinline)) void hand_on(unsigned to) {
    if (to == current_) return;
    if (_setjmp(lanes_[current_].at) != 0) return arrive();
    current_ = to;
    resume();
  }

 private:
  struct Lane {
    bool started = false;
    jmp_buf at;
  };

  static void start() {
    Stacks& self = *here();
    self.arrive();
    (*self.body_)(self.current_);
    self.finish();
  }

  static Stacks*& here() {
    static thread_local Stacks* stacks;
    return stacks;
  }

  [[noreturn]] void finish() {
    const unsigned next = (*after_)(current_);
    if (next == kNobody) abandon();
    current_ = next;
    resume();
  }

  [[noreturn]] void resume() {
    if (!lanes_[current_].started) enter(current_);
    leave_for(stacks_.get() + current_ * kStack, kStack);
    _longjmp(lanes_[current_].at, 1);
  }

  // Not instrumented: nobody would clear the traces of a frame that is left for good.
  __attribute__((noinline, no_sanitize_address)) [[noreturn]] void enter(unsigned lane) {
    lanes_[lane].started = true;
    here() = this;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks_.get() + lane * kStack;
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, start, 0);
    leave_for(context.uc_stack.ss_sp, kStack);
    setcontext(&context);
    std::abort();
  }

  // AddressSanitizer wants to know on which stack the program is.
#if defined(__SANITIZE_ADDRESS__)
  void leave_for(const void* stack, std::size_t size) { __sanitizer_start_switch_fiber(nullptr, stack, size); }
  void arrive() {
    const void* from = nullptr;
    std::size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &from, &size);
    if (!home_stack_) home_stack_ = from, home_size_ = size;
  }
#else
  void leave_for(const void*, std::size_t) {}
  void arrive() {}
#endif

  std::vector<Lane> lanes_;
  std::unique_ptr<char[]> stacks_;
  jmp_buf home_;
  const void* home_stack_ = nullptr;
  std::size_t home_size_ = 0;
  unsigned current_ = 0;
  const std::function<void(unsigned)>* body_ = nullptr;
  const std::function<unsigned(unsigned)>* after_ = nullptr;
};

}  // namespace dtcomm::cuda
