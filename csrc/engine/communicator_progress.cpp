// Who runs the operations of a communicator: the caller itself where nothing is queued, whoever waits for one that is,
// and the progress thread for the rest. One at a time drives; the others hand over.
#include <sched.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "engine/communicator.h"
#include "engine/cpu_relax.h"
#include "engine/progress_thread.h"

namespace dtcomm {
namespace {

// A queued operation of so few bytes is over sooner than another thread wakes: whoever queues it tries it first.
constexpr std::size_t kTryBytes = 64 * 1024;
// Where the progress thread has no core of its own, its share of these may as well be done before it is woken.
constexpr std::size_t kTryShared = 4 * 1024 * 1024;
constexpr int kTryBudget = 64;
constexpr int kReliefLooks = 16;  // looks at one flag take as long as a look around all communicators
constexpr std::uint64_t kReliefYieldNs = 50 * 1000;
constexpr int kWaitBudget = 256;  // instructions a look of a thread that has nothing else to do

}  // namespace

bool Patience::exhausted() {
  if (looks_ < spins_) {
    ++looks_;
    cpu_pause();
    return false;
  }
  const std::uint64_t now = now_ns();
  if (since_ == 0) since_ = now;
  if (now - since_ >= yield_ns_) return true;
  sched_yield();
  return false;
}

void Communicator::require_usable() const {
  if (closed_) throw std::logic_error("this communicator has been destroyed");
  if (failed_) throw Error(failure_kind_, "this communicator failed earlier: " + failure_text_);
}

// Nobody drives from here on; true where a thread that waits was told to.
bool Communicator::release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  driven_ = false;
  if (closed_) left_.notify_all();
  if (queue_.empty() || waiting_.empty()) return false;
  waiting_.back()->call();
  return true;
}

// Hands over: to a thread that waits for one of the operations, else to the progress thread.
void Communicator::leave() {
  bool more = push_out();
  if (release()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    more |= !queue_.empty() && !driven_;
  }
  if (more) ProgressThread::instance().wake();
}

// Waits until nobody drives any more; `closed_` keeps newcomers away.
void Communicator::evict_driver() {
  closing_.store(true, std::memory_order_release);
  Process::instance().page().bell.ring();
  std::unique_lock<std::mutex> lock(mutex_);
  left_.wait(lock, [&] { return !driven_; });
}

std::uint64_t Communicator::run(Call call) {
  std::uint64_t number = 0;
  const std::uint64_t issued = now_ns();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    require_usable();
    if (!driven_ && queue_.empty()) {
      driven_ = true;
      number = ++operations_;
      flights_.issue(number, call.plan, issued);
      flights_.start(number, issued);
    }
  }
  if (number == 0) {
    const auto work = submit(std::move(call));
    wait(work);
    return work->wire_bytes;
  }
  std::exception_ptr failure;
  std::uint64_t sent = 0;
  bool entered = false;
  try {
    check_failures();
    const std::uint64_t operation = begin(call, number);
    entered = true;
    Machine machine(*this, std::move(call), operation, number);
    if (machine.advance() != Progress::done) drive(machine, issued + timeout_ns_.load(std::memory_order_relaxed));
    sent = machine.wire_bytes();
  } catch (...) {
    failure = caught();
  }
  bool more = push_out();
  {
    const std::uint64_t now = now_ns();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!entered) flights_.start(number, 0);  // it came when the others had given up
    flights_.finish(number, failure != nullptr, now);
    total_wire_bytes_ += sent;
    more |= !queue_.empty() || closed_;
    if (!more) driven_ = false;
  }
  if (failure) fail_queue(failure);
  if (more) leave();
  if (failure) std::rethrow_exception(failure);
  return sent;
}

// The error that is being handled, made known to the peers.
std::exception_ptr Communicator::caught() {
  try {
    throw;
  } catch (const Error& error) {
    fail(error, culprit_);
  } catch (const std::exception& error) {
    if (!closing_.load(std::memory_order_acquire)) {
      fail(Error(ErrorKind::internal, who(rank) + ": " + error.what()), rank);
    }
  }
  return std::current_exception();
}

std::shared_ptr<Work> Communicator::submit(Call call) {
  auto work = std::make_shared<Work>();
  bool mine = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    require_usable();
    Operation operation;
    operation.call = std::move(call);
    operation.work = work;
    operation.number = ++operations_;
    flights_.issue(operation.number, operation.call.plan, now_ns());
    queue_.push_back(std::move(operation));
    if (driven_) return work;  // whoever drives finds it
    mine = queue_.size() == 1 && queue_.front().call.plan->input_bytes() <= (relieves ? kTryShared : kTryBytes);
    if (mine) driven_ = true;
  }
  if (mine) {
    advance_queue(kTryBudget);
    leave();
  } else {
    ProgressThread::instance().wake();
  }
  return work;
}

void Communicator::wait(const std::shared_ptr<Work>& work) {
  while (!work->finished()) {
    bool mine = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (queue_.empty() || closed_) break;  // somebody is about to finish it
      mine = !driven_;
      driven_ = true;
      if (!mine) waiting_.push_back(work.get());
    }
    if (mine) {
      drive_until(*work);
    } else {
      work->await_call();
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting_.erase(std::find(waiting_.begin(), waiting_.end(), work.get()));
      if (driven_ || !work->finished()) continue;
      driven_ = true;  // it was asked to drive, and does not any more
    }
    leave();
  }
  work->wait();
}

namespace {

// Peers ring while there is somebody to be woken.
struct Asleep {
  explicit Asleep(Bell& bell) : bell(bell) { bell.sleepers.fetch_add(1, std::memory_order_seq_cst); }
  ~Asleep() { bell.sleepers.fetch_sub(1, std::memory_order_release); }
  Asleep(const Asleep&) = delete;
  Bell& bell;
};

}  // namespace

// Looks until `look` says that it is over: spins, yields, then sleeps until a peer rings. `rest` comes before a sleep.
template <class Looks, class Rests>
void Communicator::persist(Patience patience, Looks look, Rests rest) {
  if (wired) wake_on_time();
  Bell& bell = Process::instance().page().bell;
  for (;;) {
    // Where it is known when the next payload comes in, sleep till then.
    const bool tired = patience.exhausted();
    const std::uint64_t pause = nap(kSleepNs);
    Progress progress = Progress::blocked;
    if (pause == kSleepNs ? tired : pause > 0) {
      rest();
      const Asleep asleep(bell);
      const std::uint32_t seen = bell.word.load(std::memory_order_acquire);
      progress = look();
      if (progress == Progress::blocked) doze(bell, seen, suspect_ >= 0 ? 0 : nap(kSleepNs));
    } else {
      progress = look();
    }
    if (progress == Progress::done) return;
    if (progress == Progress::moved) patience.moved();
  }
}

void Communicator::drive(Machine& machine, std::uint64_t deadline) {
  check_machine(machine);
  persist(
      Patience(options_.spins, options_.yield_ns),
      [&] {
        if (closing_.load(std::memory_order_acquire))
          throw std::logic_error("the communicator was destroyed meanwhile");
        look();
        const Progress progress = machine.advance();
        check_machine(machine);
        return progress;
      },
      [&] { watch(machine, deadline); });
}

// The caller waits for this operation: it runs what is queued up to it. Where it has the progress thread's core it does
// that one's work meanwhile; but not where some wait for sockets or emulated links, each in its own way.
void Communicator::drive_until(const Work& work) {
  std::optional<ProgressThread::Relief> relief;
  if (relieves && !ProgressThread::instance().wired()) relief.emplace(this);
  persist(
      relief ? Patience(std::max(1, options_.spins / kReliefLooks), std::min(options_.yield_ns, kReliefYieldNs))
             : Patience(options_.spins, options_.yield_ns),
      [&] {
        if (closing_.load(std::memory_order_acquire)) return Progress::done;
        const Look found = advance_queue(kWaitBudget);
        if (work.finished()) return Progress::done;
        const bool moved = found == Look::moved || (relief && relief->look());
        return moved ? Progress::moved : Progress::blocked;
      },
      [&] {
        watch_queue();
        if (relief) relief->watch();
      });
}

}  // namespace dtcomm
