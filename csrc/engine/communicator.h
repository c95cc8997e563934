// A communicator: the ranks that run collectives together, as one of them sees it. It runs operations, inline or
// queued, and composes the parts that each have one task: PeerSet (connections), OperationQueue (order, and who runs
// operations), FailureMonitor (errors) and spin_yield_sleep (waiting).
//
// Three kinds of threads run operations: the caller itself if nothing is queued, a thread that waits for a queued
// operation, and otherwise the progress thread. OperationQueue decides which of them may at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/failure_monitor.h"
#include "engine/operation_queue.h"
#include "engine/peer_set.h"
#include "engine/tuner.h"
#include "engine/waiter.h"
#include "engine/work.h"

namespace dtcomm {

struct CommunicatorOptions {
  PeerSetOptions peers;
  std::uint64_t timeout_ns = 0;
  WaitPolicy wait;
};

class Communicator {
 public:
  explicit Communicator(const CommunicatorOptions& options);
  ~Communicator() { close(); }
  Communicator(const Communicator&) = delete;

  PeerAddress address() const { return peers_.address(); }
  // Connects to the peers; operations may run from then on. Throws std::system_error or std::runtime_error if a peer
  // cannot be reached.
  void attach(const std::vector<PeerAddress>& addresses);
  // UCX: the address of this rank's endpoint, and connections to the peers that share
  // no memory, by the addresses of all ranks; to be called after attach(). Payloads then go through UCX. Throw
  // std::runtime_error with the reason if that is impossible.
  std::string make_ucx_address() { return peers_.make_ucx_address(); }
  void connect_ucx(const std::vector<std::string>& addresses) { peers_.connect_ucx(addresses); }
  // Whether all peers have connected to this rank, too; to be called until they have.
  bool ucx_is_connected() { return peers_.ucx_is_connected(); }
  // The connections to peers on other hosts, for the thread that makes those anew that have ended. It calls
  // send_rest() after each change: what is to be sent again may belong to operations that no thread runs any more.
  RemotePeerSet& connections() { return peers_.remote(); }
  void send_rest();
  // Whether this rank may copy out of its peers' private memory.
  Status can_single_copy() const { return peers_.can_single_copy(); }
  // Whether threads that wait also do the progress thread's work, because there are fewer cores than threads.
  bool waiters_help_progress = false;
  // How many cores a rank of this host has, and whether its tuner never stops trying. To be set before the first
  // operation.
  void set_tuning(double cores_per_rank, bool always) {
    tuner_.cores_per_rank = cores_per_rank;
    tuner_.always = always;
  }
  double cores_per_rank() const { return tuner_.cores_per_rank; }
  // To be called before the first operation. The yield time is left alone where payloads take time to arrive.
  void set_wait_policy(const WaitPolicy& policy);
  // The time limit of the operations that start from now on.
  void set_timeout(std::uint64_t timeout_ns) { timeout_ns_.store(timeout_ns, std::memory_order_relaxed); }

  // Runs an operation to its end, behind what is queued; waits by `policy` instead of the communicator's own, if given.
  // Returns the bytes sent.
  std::uint64_t run(Call call, const WaitPolicy* policy = nullptr);
  // Queues an operation. `begin`: the caller is about to wait, so it begins the operation whatever its size.
  std::shared_ptr<Work> submit(Call call, bool begin = false);
  // Waits for a queued operation, and meanwhile runs what is queued up to it unless another thread does. Rethrows the
  // operation's failure. An interrupt (InterruptCheck) of this or another wait ends all operations on all ranks.
  void wait(const std::shared_ptr<Work>& work);
  // Ends all operations on all ranks because a wait for this one was interrupted; returns before they have ended.
  void interrupt(const Work& work) {
    if (!work.finished()) failures_.set_interrupted(true);
  }
  // Ends all operations with an error, tells the peers and releases all memory. Does nothing in a forked child.
  void close() { close_all({this}); }
  // Closes several communicators together: peers that do not receive what was sent to them delay it as long as one
  // communicator would.
  static void close_all(const std::vector<Communicator*>& communicators);
  // The copy that a forked child inherits is unusable, and must not be destroyed: threads that the child does not have
  // may hold its locks, or have been about to change it.
  bool in_forked_child() const;

  // For reports.
  std::string failure() const { return failures_.message(); }  // empty unless it failed
  std::uint64_t operations() const { return queue_.operations(); }
  std::uint64_t wire_bytes() const { return queue_.wire_bytes(); }
  std::uint64_t single_copy_bytes() const { return peers_.single_copy_bytes(); }
  // Nothing in a forked child, in which a thread that is not there may hold the locks.
  std::vector<FlightRecord> flight_records() const;
  std::vector<SizeClassReport> size_classes() const;
  // The transports and devices that UCX uses to reach the peers; empty after close().
  std::vector<std::string> ucx_lanes();
  // Nothing in a forked child either, nor after close(), as there is no memory to read.
  std::vector<PeerSnapshot> peer_snapshots() const;

  // For the progress thread. drive_front() advances the first queued operation by at most `budget` instructions; `idle`
  // if there is none, or another thread runs it.
  enum class DriveResult { idle, moved, blocked };
  DriveResult drive_front(int budget);
  // Before the progress thread sleeps: fails the first operation if it can no longer complete.
  void check_front();
  // Before the progress thread sleeps on the peers' epoll_fd(): false if something is there already.
  bool arm() { return peers_.arm(); }
  bool has_undriven_work() const { return queue_.has_undriven_work(); }
  const PeerSet& peers() const { return peers_; }

 private:
  DriveResult advance_front(int budget);
  bool advance_second(const QueuedOperation& front, int budget);
  void check_blocked_front();
  void check_blocked(Interpreter& interpreter, std::uint64_t deadline);
  std::unique_ptr<Interpreter> start_operation(QueuedOperation& operation);
  void require_no_handler() const;
  void check_interrupt(InterruptWatch& interrupts);
  void drive_inline(Interpreter& interpreter, std::uint64_t deadline, const WaitPolicy& policy);
  void drive_until_finished(const Work& work);
  void hand_over();
  std::exception_ptr publish_current_exception();
  void start_closing();
  void end_closing();
  std::uint64_t timeout_ns() const { return timeout_ns_.load(std::memory_order_relaxed); }

  PeerSet peers_;
  Tuner tuner_;
  mutable std::mutex attached_mutex_;  // held while peers are attached, listed or released
  FailureMonitor failures_;
  OperationQueue queue_;
  WaitPolicy wait_policy_;
  std::atomic<std::uint64_t> timeout_ns_;
  std::atomic<std::thread::id> handler_thread_{};  // the driver, while it may run a handler of an interrupt
  int owner_pid_;
};

}  // namespace dtcomm
