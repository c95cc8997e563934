#include "engine/communicator.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "engine/progress_thread.h"

namespace dtcomm {
namespace {

// A queued operation of at most this size is complete sooner than another thread wakes up, so the thread that queues it
// tries to run it first.
constexpr std::size_t kInlineBytes = 64 * 1024;
// The limit if the progress thread has no core of its own: then this thread may as well do its share first.
constexpr std::size_t kInlineBytesSharedCore = 4 * 1024 * 1024;
// Instructions before other threads or communicators are looked after.
constexpr int kInlineBudget = 64;
// Waking the progress thread takes several microseconds. The peers of a small operation usually call it at about the
// same time, so the caller polls for a moment before it leaves the operation to that thread.
constexpr std::size_t kPolledBytes = 16 * 1024;
constexpr std::uint64_t kPollNs = 2000;
constexpr int kWaitBudget = 256;  // of a thread that has nothing else to do
// A poll of a waiter that helps the progress thread takes as long as this many polls of one flag.
constexpr int kHelpingPollCost = 16;
constexpr std::uint64_t kHelpingYieldNs = 50 * 1000;

}  // namespace

Communicator::Communicator(const CommunicatorOptions& options)
    : peers_(options.peers),
      tuner_(peers_),
      failures_(peers_),
      queue_(failures_),
      wait_policy_(options.wait),
      timeout_ns_(options.timeout_ns),
      owner_pid_(static_cast<int>(getpid())) {
  peers_.tuner = &tuner_;
}

void Communicator::attach(const std::vector<PeerAddress>& addresses) {
  {
    const std::lock_guard<std::mutex> lock(attached_mutex_);
    peers_.attach(addresses);
  }
  // A frame wakes its sleeper at once, whereas a thread that yields on a busy core is away for a whole time slice.
  if (peers_.has_remote_peers()) wait_policy_.yield_ns = 0;
  ProgressThread::instance().add(this);
}

void Communicator::set_wait_policy(const WaitPolicy& policy) {
  wait_policy_.spins = policy.spins;
  if (!peers_.has_latency) wait_policy_.yield_ns = policy.yield_ns;
}

void Communicator::close_all(const std::vector<Communicator*>& communicators) {
  std::vector<Communicator*> closing;
  for (Communicator* const communicator : communicators) communicator->require_no_handler();
  for (Communicator* const communicator : communicators) {
    if (!communicator->in_forked_child() && communicator->queue_.close()) closing.push_back(communicator);
  }
  for (Communicator* const communicator : closing) communicator->start_closing();
  for (;;) {
    bool pending = false;
    for (Communicator* const communicator : closing) pending |= communicator->peers_.goodbye_pending();
    if (!pending) break;
    const timespec moment{0, 1000 * 1000};
    nanosleep(&moment, nullptr);
  }
  for (Communicator* const communicator : closing) communicator->end_closing();
}

void Communicator::start_closing() {
  ProgressThread::instance().remove(this);
  queue_.wait_until_free();
  queue_.fail_all(std::make_exception_ptr(ClosedError("the communicator was destroyed before this operation ended")));
  peers_.start_goodbye(failures_.failed() || queue_.operations() == 0);
}

void Communicator::end_closing() {
  peers_.end_goodbye();
  const std::lock_guard<std::mutex> lock(attached_mutex_);
  peers_.close();
}

bool Communicator::in_forked_child() const { return owner_pid_ != static_cast<int>(getpid()); }

std::vector<FlightRecord> Communicator::flight_records() const {
  if (in_forked_child()) return {};
  return queue_.flight_records();
}

std::vector<SizeClassReport> Communicator::size_classes() const {
  if (in_forked_child()) return {};
  return tuner_.reports();
}

std::vector<std::string> Communicator::ucx_lanes() {
  if (in_forked_child()) return {};
  const std::lock_guard<std::mutex> lock(attached_mutex_);
  return peers_.ucx_lanes();
}

std::vector<PeerSnapshot> Communicator::peer_snapshots() const {
  if (in_forked_child()) return {};
  const std::lock_guard<std::mutex> lock(attached_mutex_);
  return peers_.snapshots();
}

std::uint64_t Communicator::run(Call call, const WaitPolicy* policy) {
  const std::uint64_t issued = now_ns();
  const std::uint64_t number = queue_.start_inline(call.plan, issued);
  if (number == 0) {
    const auto work = submit(std::move(call));
    wait(work);
    return work->wire_bytes;
  }
  std::exception_ptr failure;
  std::uint64_t wire_bytes = 0;
  bool announced = false;
  try {
    failures_.check_peers();
    const std::uint64_t fingerprint = peers_.announce_operation(call, number);
    announced = true;
    Interpreter interpreter(peers_, std::move(call), fingerprint, number);
    if (interpreter.advance() != Progress::done) {
      drive_inline(interpreter, issued + timeout_ns(), policy ? *policy : wait_policy_);
    }
    wire_bytes = interpreter.wire_bytes();
  } catch (...) {
    failure = publish_current_exception();
  }
  const bool unsent = peers_.flush();
  const bool driving = queue_.finish_inline(number, announced, failure != nullptr, wire_bytes, unsent);
  if (failure) queue_.fail_all(failure);
  if (driving) hand_over();
  if (failure) std::rethrow_exception(failure);
  return wire_bytes;
}

std::shared_ptr<Work> Communicator::submit(Call call, bool begin) {
  require_no_handler();
  auto work = std::make_shared<Work>();
  const std::uint64_t issued = now_ns();
  const std::uint64_t poll_until = call.plan->input_bytes() <= kPolledBytes ? issued + kPollNs : 0;
  const std::size_t inline_bytes = begin ? SIZE_MAX : waiters_help_progress ? kInlineBytesSharedCore : kInlineBytes;
  switch (queue_.push(std::move(call), work, inline_bytes, issued)) {
    case OperationQueue::Pushed::to_driver:
      break;
    case OperationQueue::Pushed::drive_now:
      do {
        advance_front(kInlineBudget);
      } while (!work->finished() && now_ns() < poll_until);
      hand_over();
      break;
    case OperationQueue::Pushed::wake_progress:
      ProgressThread::instance().wake();
      break;
  }
  if (!work->finished() && !ProgressThread::instance().start()) {
    // No thread would run the operation. An error must not leave this function: the caller would free the tensors,
    // which peers may still write. The work keeps the error for those who wait for it.
    try {
      wait(work);
    } catch (...) {
    }
  }
  return work;
}

void Communicator::wait(const std::shared_ptr<Work>& work) {
  bool is_interrupted = false;
  while (!work->finished()) {
    if (in_forked_child()) throw ClosedError("the operation is one of the process that this one was forked from");
    const OperationQueue::WaitRole role = queue_.start_waiting(*work);
    if (role == OperationQueue::WaitRole::finished) break;
    if (role == OperationQueue::WaitRole::drive) {
      drive_until_finished(*work);
    } else {
      require_no_handler();
      InterruptWatch interrupts;
      while (!work->await_handover(InterruptWatch::kIntervalNs)) {
        if (interrupts.interrupted()) failures_.set_interrupted(is_interrupted = true);
      }
      if (!queue_.stop_waiting(*work)) continue;
    }
    hand_over();
  }
  if (is_interrupted && !work->failure()) failures_.set_interrupted(false);  // it ended first
  work->wait();
}

// A handler of an interrupt runs in the thread that drives: what it queues cannot run, and what it closes cannot end,
// before it returns.
void Communicator::require_no_handler() const {
  if (handler_thread_.load(std::memory_order_relaxed) != std::this_thread::get_id()) return;
  throw Error(ErrorKind::internal,
              "a signal handler calls a collective of the group in which " + peers_.name(peers_.rank) +
                  " waits, or destroys it; let the handler set a flag, or raise an exception, which ends the wait",
              peers_.rank);
}

// Driver only, before it sleeps.
void Communicator::check_interrupt(InterruptWatch& interrupts) {
  handler_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  if (interrupts.interrupted()) failures_.set_interrupted(true);
  handler_thread_.store(std::thread::id(), std::memory_order_relaxed);
}

// Ends driving: lets a waiting thread take over, or else the progress thread if something is left to do.
void Communicator::hand_over() {
  bool left = peers_.flush();
  if (queue_.release()) return;
  left |= queue_.has_undriven_work();
  if (left) ProgressThread::instance().wake();
}

// Makes the exception that is being handled known to the peers; returns it.
std::exception_ptr Communicator::publish_current_exception() {
  try {
    throw;
  } catch (const Error& error) {
    failures_.publish(error);
  } catch (const ClosedError&) {  // the peers learn of it when the communicator is closed
  } catch (const std::exception& error) {
    const Error failure(ErrorKind::internal, peers_.name(peers_.rank) + ": " + error.what(), peers_.rank);
    failures_.publish(failure);
    // What this rank raises is then the error that its peers raise, unless the arguments are at fault.
    if (dynamic_cast<const std::runtime_error*>(&error)) return std::make_exception_ptr(failure);
  }
  return std::current_exception();
}

std::unique_ptr<Interpreter> Communicator::start_operation(QueuedOperation& operation) {
  const std::uint64_t fingerprint = peers_.announce_operation(operation.call, operation.number);
  const std::uint64_t now = now_ns();
  operation.work->started_ns = now;
  operation.deadline = now + timeout_ns();
  queue_.record_start(operation.number, now);
  return std::make_unique<Interpreter>(peers_, operation.call, fingerprint, operation.number);
}

// Advances the first operation, and the second one if it may run ahead. Driver only, like all that follows.
Communicator::DriveResult Communicator::advance_front(int budget) {
  QueuedOperation* const front = queue_.front();
  if (!front) return DriveResult::idle;
  std::exception_ptr failure;
  try {
    if (!front->interpreter) {
      failures_.check_peers();
      front->interpreter = start_operation(*front);
    }
    peers_.receive();
    const Progress progress = front->interpreter->advance(budget);
    failures_.check_interpreter(*front->interpreter);
    if (progress != Progress::done) {
      const bool moved = advance_second(*front, budget) || progress == Progress::moved;
      return moved ? DriveResult::moved : DriveResult::blocked;
    }
  } catch (...) {
    failure = publish_current_exception();
  }
  queue_.finish_front(failure, timeout_ns());
  return DriveResult::moved;
}

// While the last pieces of the first operation are in flight, the second one encodes and sends its first, unless the
// two touch the same memory. Returns whether it moved.
bool Communicator::advance_second(const QueuedOperation& front, int budget) {
  if (!front.interpreter->all_pieces_started()) return false;
  QueuedOperation* const second = queue_.second();
  if (!second || second->overlaps_previous) return false;
  if (!second->interpreter) {
    second->overlaps_previous = second->call.plan->zero_copy() || !touch_disjoint_memory(front.call, second->call);
    if (second->overlaps_previous) return false;
    second->interpreter = start_operation(*second);
  }
  return second->interpreter->may_run_ahead() && second->interpreter->advance(budget, true) == Progress::moved;
}

// A thread is about to sleep.
void Communicator::check_blocked(Interpreter& interpreter, std::uint64_t deadline) {
  interpreter.end_offer();
  queue_.record_wait(interpreter.number(), interpreter.waiting_for());
  failures_.check_blocked(interpreter, deadline, timeout_ns());
}

void Communicator::check_blocked_front() {
  QueuedOperation* const front = queue_.front();
  if (!front || !front->interpreter) return;
  try {
    check_blocked(*front->interpreter, front->deadline);
  } catch (const Error& error) {
    failures_.publish(error);
    queue_.finish_front(std::current_exception(), timeout_ns());
  }
}

// Runs an operation that is not in the queue to its end.
void Communicator::drive_inline(Interpreter& interpreter, std::uint64_t deadline, const WaitPolicy& policy) {
  failures_.check_interpreter(interpreter);
  InterruptWatch interrupts;
  spin_yield_sleep(
      peers_, failures_, policy,
      [&] {
        if (queue_.closed()) throw ClosedError("the communicator was destroyed before this operation ended");
        peers_.receive();
        const Progress progress = interpreter.advance();
        failures_.check_interpreter(interpreter);
        return progress;
      },
      [&] {
        check_interrupt(interrupts);
        check_blocked(interpreter, deadline);
      });
}

// Runs what is queued until `work` is finished. If cores are shared, this thread also drives other communicators
// meanwhile, unless one of them polls sockets or an emulated link.
void Communicator::drive_until_finished(const Work& work) {
  std::optional<ProgressThread::HelpingWaiter> helper;
  WaitPolicy policy = wait_policy_;
  if (waiters_help_progress && !ProgressThread::instance().has_latency()) {
    helper.emplace(this);
    policy = {std::max(1, policy.spins / kHelpingPollCost), std::min(policy.yield_ns, kHelpingYieldNs)};
  }
  InterruptWatch interrupts;
  spin_yield_sleep(
      peers_, failures_, policy,
      [&] {
        if (queue_.closed()) return Progress::done;
        const DriveResult result = advance_front(kWaitBudget);
        if (work.finished()) return Progress::done;
        const bool moved = result == DriveResult::moved || (helper && helper->advance_others());
        return moved ? Progress::moved : Progress::blocked;
      },
      [&] {
        check_interrupt(interrupts);
        check_blocked_front();
        if (helper) helper->check_fronts();
      });
}

void Communicator::send_rest() {
  if (peers_.flush()) ProgressThread::instance().wake();
}

Communicator::DriveResult Communicator::drive_front(int budget) {
  switch (queue_.try_drive()) {
    case OperationQueue::Claim::driven:
      return DriveResult::idle;
    case OperationQueue::Claim::empty:
      if (!peers_.flush()) return DriveResult::idle;
      peers_.remote().receive();  // notices connections that have ended, whose parts go over the others
      return peers_.flush() ? DriveResult::blocked : DriveResult::idle;
    case OperationQueue::Claim::claimed:
      break;
  }
  if (peers_.has_latency) enable_precise_sleep();
  const DriveResult result = advance_front(budget);
  // A thread that waits has nothing else to do, and learns at once when its operation is complete: it takes over.
  return queue_.release() ? DriveResult::idle : result;
}

void Communicator::check_front() {
  if (queue_.try_drive() != OperationQueue::Claim::claimed) return;
  check_blocked_front();
  queue_.release();
}

}  // namespace dtcomm
