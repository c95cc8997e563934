#undef _FORTIFY_SOURCE  // its longjmp refuses another stack
#include "emulator/fibers.h"

#include <ucontext.h>

#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace dtcomm::emulator {

void Fibers::run(unsigned count, unsigned first, const std::function<void(unsigned)>& body,
                 const std::function<unsigned(unsigned)>& next) {
  body_ = &body;
  next_ = &next;
  for (unsigned fiber = 0; fiber < count; ++fiber) fibers_[fiber].started = false;
  current_ = first;
  if (_setjmp(home_) == 0) start_fiber(first);
  finish_switch();
}

void Fibers::abandon() {
  start_switch(home_stack_, home_size_);
  _longjmp(home_, 1);
}

void Fibers::switch_to(unsigned to) {
  if (to == current_) return;
  if (_setjmp(fibers_[current_].state) != 0) return finish_switch();
  current_ = to;
  resume_current();
}

void Fibers::entry() {
  Fibers& self = *active();
  self.finish_switch();
  (*self.body_)(self.current_);
  self.end_fiber();
}

Fibers*& Fibers::active() {
  static thread_local Fibers* fibers;
  return fibers;
}

void Fibers::end_fiber() {
  const unsigned next = (*next_)(current_);
  if (next == kNone) abandon();
  current_ = next;
  resume_current();
}

void Fibers::resume_current() {
  if (!fibers_[current_].started) start_fiber(current_);
  start_switch(stacks_.get() + current_ * kStackBytes, kStackBytes);
  _longjmp(fibers_[current_].state, 1);
}

// Not instrumented: AddressSanitizer would never clear its marks of a frame that is left for good.
__attribute__((noinline, no_sanitize_address)) void Fibers::start_fiber(unsigned fiber) {
  fibers_[fiber].started = true;
  active() = this;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks_.get() + fiber * kStackBytes;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
  start_switch(context.uc_stack.ss_sp, kStackBytes);
  setcontext(&context);
  std::abort();
}

// AddressSanitizer has to know on which stack the program runs.
#if defined(__SANITIZE_ADDRESS__)
void Fibers::start_switch(const void* stack, std::size_t size) { __sanitizer_start_switch_fiber(nullptr, stack, size); }

void Fibers::finish_switch() {
  const void* from = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(nullptr, &from, &size);
  if (!home_stack_) home_stack_ = from, home_size_ = size;
}
#else
void Fibers::start_switch(const void*, std::size_t) {}
void Fibers::finish_switch() {}
#endif

}  // namespace dtcomm::emulator
