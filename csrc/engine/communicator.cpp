#include "engine/communicator.h"

#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/mix.h"
#include "engine/pause.h"
#include "engine/progress.h"

namespace dtcomm {
namespace {

constexpr std::uint64_t kSleepNs = 20 * 1000 * 1000;
// A queued operation of so few bytes is over sooner than another thread wakes: whoever queues it tries it first.
constexpr std::size_t kTryBytes = 32 * 1024;
constexpr int kTryBudget = 64;

// The kernel ends this thread's sleeps up to 50 us late otherwise, as long as many a link's latency.
void wake_on_time() {
  thread_local bool set = false;
  if (!set) prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  set = true;
}

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

Communicator::Communicator(const CommunicatorOptions& options)
    : options_(options), token_(random_token()), owner_(getpid()), timeout_ns_(options.timeout_ns) {
  rank = options.rank;
  ranks = options.ranks;
  layout_ = {static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(ranks), options.max_boxes, options.slot_bytes,
             options.inside.on() || options.between.on()};
  area_ = Mapping::create("dtcomm-area", layout_.bytes());
  own_ = view_of(area_.data(), layout_);
  new (own_.head) AreaHead;
  for (std::size_t i = 0; i < std::size_t{options.max_boxes} * kSlots; ++i) new (own_.flags + i) Flag;
  for (std::size_t i = 0; i < layout_.stamps(); ++i) new (own_.stamps + i) Stamp;
  const std::size_t flags = std::size_t{options.max_boxes} * kSlots;
  if (options.inside.on()) inside_ = std::make_unique<Link>(options.inside, Nic::instance(0), ranks, flags);
  if (options.between.on()) between_ = std::make_unique<Link>(options.between, Nic::instance(1), ranks, flags);
  own_.head->magic = kAreaMagic;
  own_.head->bytes = layout_.bytes();
  own_.head->rank = static_cast<std::uint32_t>(rank);
  own_.head->ranks = static_cast<std::uint32_t>(ranks);
  own_.head->max_boxes = options.max_boxes;
  own_.head->pid = static_cast<std::int32_t>(getpid());
  own_.head->token = token_;
}

Communicator::~Communicator() { close(); }

PeerAddress Communicator::address() const {
  Process& process = Process::instance();
  return {static_cast<int>(getpid()), process.fd(), process.page().token, area_.fd(), token_, -1, false, ""};
}

void Communicator::attach(const std::vector<PeerAddress>& addresses) {
  if (addresses.size() != static_cast<std::size_t>(ranks)) throw std::invalid_argument("attach: one address per rank");
  for (int peer = 0; peer < ranks; ++peer) {  // first of all: they own their sockets
    const PeerAddress& address = addresses[static_cast<std::size_t>(peer)];
    if (address.socket < 0) continue;
    AreaLayout layout = layout_;
    layout.rank = static_cast<std::uint32_t>(peer);
    remotes_.resize(addresses.size());
    remotes_[static_cast<std::size_t>(peer)] = std::make_unique<Remote>(address.socket, layout, rank);
    wire_.add(address.socket, peer);
  }
  links.assign(layout_.link ? addresses.size() : 0, nullptr);
  wired = !remotes_.empty();
  // What comes over a socket wakes its sleeper at once; who yields on a busy core is away for a whole time slice.
  if (wired) options_.yield_ns = 0;
  for (int peer = 0; peer < ranks; ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    const PeerAddress& address = addresses[index];
    names_.push_back(address.name);
    peer_areas_.emplace_back();
    processes_.emplace_back();
    pidfds_.push_back(-1);
    if (peer == rank) {
      peers.push_back(own_);
      continue;
    }
    if (layout_.link) {
      links[index] = address.between ? between_.get() : inside_.get();
      wired |= links[index] != nullptr;
    }
    if (address.socket >= 0) {
      peers.push_back(remotes_[index]->view());
      continue;
    }
    mixed_ = !remotes_.empty();
    AreaLayout layout = layout_;
    layout.rank = static_cast<std::uint32_t>(peer);
    // Open the process first: the tokens then tell that it is the one we mean, and not a later one with its pid.
    const auto pidfd = static_cast<int>(syscall(SYS_pidfd_open, address.pid, 0));
    if (pidfd < 0) throw std::system_error(errno, std::generic_category(), "pidfd_open of " + address.name);
    pidfds_.back() = pidfd;
    peer_areas_.back() = Mapping::attach(address.pid, address.area_fd, layout.bytes());
    const PeerView view = view_of(peer_areas_.back().data(), layout);
    if (view.head->magic != kAreaMagic || view.head->token != address.area_token ||
        view.head->rank != static_cast<std::uint32_t>(peer) || view.head->bytes != layout.bytes()) {
      throw std::runtime_error("shared memory of " + address.name + " is not what it announced");
    }
    processes_.back() = std::make_unique<Peer>(address.pid, address.page_fd, address.page_token);
    peers.push_back(view);
  }
  probes = options_.probes && remotes_.empty();
  ProgressThread::instance().add(this);
}

std::string Communicator::who(int peer) const {
  const auto index = static_cast<std::size_t>(peer);
  return index < names_.size() ? names_[index] : "rank " + std::to_string(peer);
}

void Communicator::require_usable() const {
  if (closed_) throw std::logic_error("this communicator has been destroyed");
  if (failed_) throw Error(failure_kind_, "this communicator failed earlier: " + failure_text_);
}

std::uint64_t Communicator::begin(const Call& call, std::uint64_t number) {
  const std::uint64_t operation = announce(*own_.head, call, number);
  announced_ = number;
  if (call.plan->direct()) ring_peers();
  return operation;
}

std::uint64_t Communicator::run(Call call) {
  std::uint64_t number = 0;
  const std::uint64_t issued = now_ns();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    require_usable();
    if (!busy_ && queue_.empty()) {
      busy_ = true;
      number = ++operations_;
      flights_.issue(number, call.plan, issued);
      flights_.start(number, issued);
    }
  }
  if (number == 0) {
    const auto work = submit(std::move(call));
    work->wait();
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
  } catch (const Error& error) {
    fail(error, culprit_);
    failure = std::current_exception();
  } catch (const std::exception& error) {
    fail(Error(ErrorKind::internal, who(rank) + ": " + error.what()), rank);
    failure = std::current_exception();
  }
  bool more = push_out();
  {
    const std::uint64_t now = now_ns();
    const std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
    if (!entered) flights_.start(number, 0);  // it came when the others had given up
    flights_.finish(number, failure != nullptr, now);
    total_wire_bytes_ += sent;
    more |= !queue_.empty();
  }
  if (more) ProgressThread::instance().wake();
  if (failure) {
    fail_queue(failure);
    std::rethrow_exception(failure);
  }
  return sent;
}

std::shared_ptr<Work> Communicator::submit(Call call) { return submit(std::move(call), std::make_shared<Work>()); }

std::shared_ptr<Work> Communicator::submit(Call call, std::shared_ptr<Work> work) {
  Operation* front = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    require_usable();
    Operation operation;
    operation.call = std::move(call);
    operation.work = work;
    operation.number = ++operations_;
    flights_.issue(operation.number, operation.call.plan, now_ns());
    queue_.push_back(std::move(operation));
    if (!busy_ && queue_.size() == 1 && queue_.front().call.plan->input_bytes() <= kTryBytes) {
      busy_ = true;
      front = &queue_.front();
    }
  }
  bool more = true;
  if (front && advance_front(*front, kTryBudget)) {
    const std::lock_guard<std::mutex> lock(mutex_);
    more = !queue_.empty();
  }
  if (more) ProgressThread::instance().wake();
  return work;
}

bool Communicator::advance_front(Operation& front, int budget) {
  std::exception_ptr failure;
  try {
    check_failures();
    std::unique_ptr<Machine> machine = make_machine(front);
    look();
    const Progress progress = machine->advance(budget);
    check_machine(*machine);
    if (progress != Progress::done) {
      const std::lock_guard<std::mutex> lock(mutex_);
      front.machine = std::move(machine);  // from here on the progress thread may take it on
      return false;
    }
    // Not into the operation: the progress thread would take it on while it is finished here.
    front.work->wire_bytes = machine->wire_bytes();
    front.work->times = machine->times();
  } catch (const Error& error) {
    fail(error, culprit_);
    failure = std::current_exception();
  } catch (const std::exception& error) {
    fail(Error(ErrorKind::internal, who(rank) + ": " + error.what()), rank);
    failure = std::current_exception();
  }
  finish_front(failure);
  return true;
}

void Communicator::drive(Machine& machine, std::uint64_t deadline) {
  if (wired) wake_on_time();
  Patience patience(options_.spins, options_.yield_ns);
  Bell& bell = Process::instance().page().bell;
  for (;;) {
    check_machine(machine);
    // Where it is known when the next payload comes in, sleep till then.
    const bool tired = patience.exhausted();
    const std::uint64_t rest = nap(kSleepNs);
    if (rest == kSleepNs ? tired : rest > 0) {
      watch(machine, deadline);
      bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
      const std::uint32_t seen = bell.word.load(std::memory_order_acquire);
      look();
      const Progress progress = machine.advance();
      if (progress == Progress::blocked && !machine.mismatch() && !machine.damage()) {
        own_.head->waiting_for.store(machine.blocker(), std::memory_order_relaxed);
        own_.head->waiting_since.store(now_ns(), std::memory_order_release);
        doze(bell, seen, suspect_ >= 0 ? 0 : nap(kSleepNs));
      }
      bell.sleepers.fetch_sub(1, std::memory_order_release);
      if (progress == Progress::done) return;
      if (progress == Progress::moved) patience.moved();
      continue;
    }
    look();
    switch (machine.advance()) {
      case Progress::done:
        return;
      case Progress::moved:
        patience.moved();
        break;
      case Progress::blocked:
        break;
    }
  }
}

Communicator::Look Communicator::drive_front(int budget) {
  Operation* front = nullptr;
  bool fresh = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty()) return !busy_ && push_out() ? Look::blocked : Look::idle;
    front = &queue_.front();  // a deque's front stays where it is while others are pushed behind it
    if (!front->machine) {
      if (busy_) return Look::idle;  // an inline caller is at work; it wakes us when it is done
      busy_ = fresh = true;
    }
  }
  if (fresh) return advance_front(*front, budget) ? Look::moved : Look::blocked;
  std::exception_ptr failure;
  try {
    if (wired) wake_on_time();
    look();
    const Progress progress = front->machine->advance(budget);
    check_machine(*front->machine);
    if (progress != Progress::done) {
      const bool moved = drive_ahead(*front, budget) || progress == Progress::moved;
      return moved ? Look::moved : Look::blocked;
    }
  } catch (const Error& error) {
    fail(error, culprit_);
    failure = std::current_exception();
  } catch (const std::exception& error) {
    fail(Error(ErrorKind::internal, who(rank) + ": " + error.what()), rank);
    failure = std::current_exception();
  }
  finish_front(failure);
  return Look::moved;
}

std::unique_ptr<Machine> Communicator::make_machine(Operation& operation) {
  const std::uint64_t name = begin(operation.call, operation.number);
  const std::uint64_t now = now_ns();
  operation.work->started_ns = now;
  operation.deadline = now + timeout_ns_.load(std::memory_order_relaxed);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    flights_.start(operation.number, now);
  }
  return std::make_unique<Machine>(*this, operation.call, name, operation.number);
}

// While the last pieces of the front operation are on their way the next one encodes and sends its first, unless the
// two touch the same memory. True where it moved.
bool Communicator::drive_ahead(const Operation& front, int budget) {
  if (!front.machine->launched()) return false;
  Operation* next = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.size() < 2) return false;
    next = &queue_[1];
  }
  if (next->alone) return false;
  if (!next->machine) {
    next->alone = next->call.plan->direct() || !disjoint(front.call, next->call);
    if (next->alone) return false;
    next->machine = make_machine(*next);
  }
  return next->machine->independent() && next->machine->advance(budget, true) == Progress::moved;
}

void Communicator::watch_front() {
  Operation* front = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || !queue_.front().machine) return;
    front = &queue_.front();
  }
  try {
    own_.head->waiting_for.store(front->machine->blocker(), std::memory_order_relaxed);
    own_.head->waiting_since.store(now_ns(), std::memory_order_release);
    watch(*front->machine, front->deadline);
  } catch (const Error& error) {
    fail(error, culprit_);
    finish_front(std::current_exception());
  }
}

void Communicator::finish_front(std::exception_ptr failure) {
  std::shared_ptr<Work> work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Operation& front = queue_.front();
    work = front.work;
    if (front.machine) {
      work->wire_bytes = front.machine->wire_bytes();
      work->times = front.machine->times();
    }
    total_wire_bytes_ += work->wire_bytes;
    work->finished_ns = now_ns();
    flights_.finish(front.number, failure != nullptr, work->finished_ns);
    queue_.pop_front();
    busy_ = !queue_.empty() && queue_.front().machine;  // the next one may be under way
    if (busy_) queue_.front().deadline = work->finished_ns + timeout_ns_.load(std::memory_order_relaxed);
  }
  work->finish(failure);
  if (failure) fail_queue(failure);
}

void Communicator::fail_queue(std::exception_ptr failure) {
  std::deque<Operation> queue;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue.swap(queue_);
    busy_ = false;
    for (const Operation& operation : queue) flights_.finish(operation.number, true, now_ns());
  }
  for (Operation& operation : queue) operation.work->finish(failure);
}

void Communicator::check_failures() const {
  for (const PeerView& peer : peers) {
    const Failure& failure = peer.head->failure;
    if (failure.state.load(std::memory_order_acquire) == 2) throw Error(failure.kind, failure.text);
  }
}

bool Communicator::dead(int peer) {
  if (const Remote* const remote = remote_of(peer)) {
    return remote->stream().ended() && !remote->view().head->closed.load(std::memory_order_acquire);
  }
  pollfd watched{pidfds_[static_cast<std::size_t>(peer)], POLLIN, 0};
  return peer != rank && watched.fd >= 0 && poll(&watched, 1, 0) > 0;
}

// Decides whether a blocked operation can still end: the error that it raises otherwise names the rank at fault.
void Communicator::watch(const Machine& machine, std::uint64_t deadline) {
  const std::uint64_t number = machine.number();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    flights_.wait(number, machine.blocker());
  }
  tell(machine);
  check_failures();
  for (const PeerView& peer : peers) {
    const OpHeader& header = peer.head->ops[number % kOpRing];
    if (header.number.load(std::memory_order_acquire) == number &&
        header.fingerprint.load(std::memory_order_relaxed) != machine.operation()) {
      raise_mismatch(machine);
    }
  }
  const int blocker = machine.blocker();
  if (blocker >= 0 && dead(blocker)) {
    if (suspect_ == blocker) {
      culprit_ = blocker;
      const Remote* const remote = remote_of(blocker);
      const std::string how = remote ? "its connection ended (" + remote->stream().why() + ")" : "its process ended";
      throw Error(ErrorKind::peer_lost, who(blocker) + " is gone: " + how + " during operation " +
                                            std::to_string(number) + ", " + machine.call().plan->text());
    }
    suspect_ = blocker;  // it may have sent what we need with its last breath
    return;
  }
  if (blocker >= 0 && peers[static_cast<std::size_t>(blocker)].head->closed.load(std::memory_order_acquire)) {
    if (suspect_ == blocker) {
      culprit_ = blocker;
      throw Error(ErrorKind::peer_lost, who(blocker) + " has destroyed its communicator before operation " +
                                            std::to_string(number) + ", " + machine.call().plan->text());
    }
    suspect_ = blocker;
    return;
  }
  suspect_ = -1;
  if (now_ns() > deadline) raise_timeout(machine);
}

// What the ranks say about the operation with our number, those who say the same together.
void Communicator::raise_mismatch(const Machine& machine) {
  const std::uint64_t number = machine.number();
  const std::uint64_t patience = now_ns() + 200 * 1000 * 1000;
  std::vector<std::pair<std::string, std::vector<int>>> statements;
  std::vector<std::uint64_t> fingerprints;
  std::vector<int> silent;
  told_ = 0;
  tell(machine);
  for (;;) {
    pump();
    check_failures();
    statements.clear();
    fingerprints.clear();
    silent.clear();
    for (int peer = 0; peer < ranks; ++peer) {
      const OpHeader& header = peers[static_cast<std::size_t>(peer)].head->ops[number % kOpRing];
      if (header.number.load(std::memory_order_acquire) != number) {
        silent.push_back(peer);
        continue;
      }
      const std::uint64_t fingerprint = header.fingerprint.load(std::memory_order_relaxed);
      const std::string text(header.text, strnlen(header.text, kOpText));
      std::size_t at = 0;
      while (at < fingerprints.size() && fingerprints[at] != fingerprint) ++at;
      if (at == fingerprints.size()) {
        fingerprints.push_back(fingerprint);
        statements.push_back({text, {}});
      }
      statements[at].second.push_back(peer);
    }
    if (silent.empty() || now_ns() > patience) break;
    sched_yield();
  }
  std::string message = "ranks disagree on operation " + std::to_string(number);
  std::size_t fewest = 0;
  for (std::size_t i = 0; i < statements.size(); ++i) {
    message += i == 0 ? ": " : "; ";
    for (std::size_t j = 0; j < statements[i].second.size(); ++j) {
      message += (j == 0 ? "" : ", ") + who(statements[i].second[j]);
    }
    message += (statements[i].second.size() == 1 ? " calls " : " call ") + statements[i].first;
    // On a tie the later statement: rank 0's word counts as the rule.
    if (statements[i].second.size() <= statements[fewest].second.size()) fewest = i;
  }
  if (statements.size() < 2) {
    message += ": " + who(machine.blocker()) + " is ahead of, or at odds with, " + machine.call().plan->text();
    culprit_ = machine.blocker();
  } else {
    culprit_ = statements[fewest].second[0];
  }
  throw Error(ErrorKind::mismatch, message);
}

// The rank at the end of the chain of waits: one that sleeps in our engine says whom it waits for and when it last
// looked; one that is stopped, or busy elsewhere, has not looked lately.
void Communicator::raise_timeout(const Machine& machine) {
  int culprit = machine.blocker();
  std::vector<bool> passed(static_cast<std::size_t>(ranks), false);
  for (;;) {
    if (culprit < 0 || culprit == rank || passed[static_cast<std::size_t>(culprit)]) break;
    passed[static_cast<std::size_t>(culprit)] = true;
    const AreaHead& head = *peers[static_cast<std::size_t>(culprit)].head;
    const std::uint64_t since = head.waiting_since.load(std::memory_order_acquire);
    const int next = head.waiting_for.load(std::memory_order_relaxed);
    if (next < 0 || next == rank || since + 25 * kSleepNs < now_ns()) break;
    culprit = next;
  }
  culprit_ = culprit;
  std::string message =
      "operation " + std::to_string(machine.number()) + ", " + machine.call().plan->text() + ", did not end within " +
      std::to_string(static_cast<double>(timeout_ns_.load(std::memory_order_relaxed)) * 1e-9).substr(0, 6) + " s";
  if (culprit >= 0) {
    std::uint64_t latest = 0;
    for (const OpHeader& header : peers[static_cast<std::size_t>(culprit)].head->ops) {
      latest = std::max(latest, header.number.load(std::memory_order_relaxed));
    }
    message += ": waiting for " + who(culprit) + ", which is alive and " +
               (latest < machine.number() ? "has not called it (its last operation is " + std::to_string(latest) + ")"
                                          : std::string("does not move on"));
  }
  throw Error(ErrorKind::timeout, message);
}

void Communicator::raise_damage(const Machine& machine) {
  const Damage& damage = *machine.damage();
  char checksums[64];
  std::snprintf(checksums, sizeof checksums, "checksum %08x when sent, %08x on arrival", damage.sent, damage.arrived);
  culprit_ = damage.sender;
  throw Error(ErrorKind::corrupt, "what " + who(damage.sender) + " sent to " + who(rank) + " arrived damaged: chunk " +
                                      std::to_string(damage.chunk) + " of piece " + std::to_string(damage.piece) +
                                      " of operation " + std::to_string(machine.number()) + ", " +
                                      machine.call().plan->text() + " (" + checksums + ")");
}

// From here on every call raises; the peers read why in our area.
void Communicator::fail(const Error& error, int culprit) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_) {
      failed_ = true;
      failure_kind_ = error.kind();
      failure_text_ = error.what();
    }
  }
  Failure& failure = own_.head->failure;
  std::uint32_t none = 0;
  if (failure.state.compare_exchange_strong(none, 1)) {
    failure.kind = error.kind();
    failure.culprit = culprit;
    const std::string text(error.what());
    const std::size_t length = std::min(text.size(), sizeof failure.text - 1);
    text.copy(failure.text, length);
    failure.text[length] = 0;
    failure.state.store(2, std::memory_order_release);
  }
  ring_peers();
  tell_failure();
}

void Communicator::ring_peers() {
  full_fence();
  for (const auto& process : processes_) {
    if (process) process->page().bell.ring();
  }
}

const Remote* Communicator::remote_of(int peer) const {
  return remotes_.empty() ? nullptr : remotes_[static_cast<std::size_t>(peer)].get();
}

void Communicator::look() {
  pump();
  if (inside_) inside_->look();
  if (between_) between_->look();
}

std::uint64_t Communicator::nap(std::uint64_t most) const {
  if (inside_) most = inside_->nap(most);
  if (between_) most = between_->nap(most);
  return most;
}

void Communicator::publish_flag(std::size_t index, std::uint64_t seq, std::uint64_t operation, std::uint32_t checksum) {
  Flag& flag = own_.flags[index];
  flag.operation.store(operation, std::memory_order_relaxed);
  flag.checksum.store(checksum, std::memory_order_relaxed);
  flag.seq.store(seq, std::memory_order_release);
  ring_peers();
}

void Communicator::publish_done(std::uint64_t pieces) {
  own_.head->done.store(pieces, std::memory_order_release);
  ring_peers();
  if (remotes_.empty()) return;
  const std::lock_guard<std::mutex> lock(remotes_mutex_);
  for (const auto& remote : remotes_) {
    if (remote) remote->send_done(pieces);
  }
}

std::uint8_t* Communicator::resolve(int peer, std::int64_t region, std::uint64_t id, std::uint64_t offset,
                                    std::size_t bytes) {
  return processes_[static_cast<std::size_t>(peer)]->resolve(region, id, offset, bytes);
}

std::vector<Flight> Communicator::flights() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return flights_.list();
}

std::vector<Sighting> Communicator::sightings() {
  std::vector<Sighting> seen;
  for (int peer = 0; peer < static_cast<int>(peers.size()); ++peer) {
    const AreaHead& head = *peers[static_cast<std::size_t>(peer)].head;
    Sighting sighting;
    for (const OpHeader& header : head.ops) {
      const std::uint64_t number = header.number.load(std::memory_order_acquire);
      if (number <= sighting.last) continue;
      sighting.last = number;
      sighting.text.assign(header.text, strnlen(header.text, kOpText));
    }
    sighting.pieces = head.done.load(std::memory_order_relaxed);
    sighting.waiting_for = head.waiting_for.load(std::memory_order_relaxed);
    sighting.alive = !dead(peer);
    sighting.closed = head.closed.load(std::memory_order_relaxed) != 0;
    seen.push_back(std::move(sighting));
  }
  return seen;
}

std::string Communicator::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_text_;
}

void Communicator::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  if (owner_ == static_cast<int>(getpid())) {
    ProgressThread::instance().remove(this);
    fail_queue(std::make_exception_ptr(std::logic_error("the communicator was destroyed before this operation ended")));
    own_.head->closed.store(1, std::memory_order_release);
    ring_peers();
    take_leave();
  }
  for (const int pidfd : pidfds_) {
    if (pidfd >= 0) ::close(pidfd);
  }
  pidfds_.clear();
  peers.clear();
  peer_areas_.clear();
  processes_.clear();
  remotes_.clear();
  wire_.close();
  area_.reset();
}

}  // namespace dtcomm
