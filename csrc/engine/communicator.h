// The ranks of one host that talk through shared memory: their areas, the order of their operations, and what is
// done while one has to wait.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/flight_recorder.h"
#include "engine/interpreter.h"
#include "engine/process_page.h"
#include "engine/tcp_peer.h"
#include "engine/work.h"
#include "net/epoll_set.h"

namespace dtcomm {

constexpr std::uint64_t kSleepNs = 20 * 1000 * 1000;  // between two looks whether what one waits for can still come

// How a rank is found and named.
struct PeerAddress {
  int pid = 0;
  int page_fd = -1;
  std::uint64_t page_token = 0;
  std::uint64_t page = 0;  // where it lies in that process
  int area_fd = -1;
  std::uint64_t area_token = 0;
  int socket = -1;       // connected to it, where its memory cannot be shared; belongs to the communicator
  bool between = false;  // it is on another host
  std::string name;      // "rank 3 (host a, pid 17)"
};

struct CommunicatorOptions {
  int rank = 0;
  int ranks = 1;
  std::uint32_t max_boxes = 0;
  std::size_t slot_bytes = 512 * 1024;
  std::uint64_t timeout_ns = 0;
  LinkRate inside, between;  // links to emulate, in the host and between hosts; off by default
  bool probes = true;        // choose staging by the cores' round trip; otherwise stream_staging is left alone
  int spins = 64;            // looks before the first yield
  std::uint64_t yield_ns = 50 * 1000;  // time spent yielding before sleeping
};

// What a rank sees of another one in the memory that they share.
struct Sighting {
  std::uint64_t last = 0;    // the last operation that it began
  std::string text;          // what that is
  std::uint64_t pieces = 0;  // finished
  int waiting_for = -1;      // when it was last asleep
  bool alive = true;
  bool closed = false;
};

// Polls a blocked machine: quick looks first, then yields, then sleeps.
class Patience {
 public:
  Patience(int spins, std::uint64_t yield_ns) : spins_(spins), yield_ns_(yield_ns) {}
  void moved() {
    looks_ = 0;
    since_ = 0;
  }
  // True where it is time to sleep; spins or yields otherwise.
  bool exhausted();

 private:
  int spins_;
  std::uint64_t yield_ns_;
  int looks_ = 0;
  std::uint64_t since_ = 0;
};

class Communicator final : public Fabric {
 public:
  explicit Communicator(const CommunicatorOptions& options);
  ~Communicator() override;
  Communicator(const Communicator&) = delete;

  PeerAddress address() const;
  // Maps every peer's area and page. After it the communicator can run; std::system_error where a peer cannot be
  // reached.
  void attach(const std::vector<PeerAddress>& addresses);
  // What keeps this rank from reading its peers' memory; empty where nothing does.
  std::string why_no_pulls() const;
  // Runs inline where nothing is queued, behind what is queued otherwise. Returns the bytes sent.
  std::uint64_t run(Call call);
  // Queues: the progress thread runs it, or whoever waits for it.
  std::shared_ptr<Work> submit(Call call);
  // Runs what is queued up to this, unless somebody else does. Rethrows its failure.
  void wait(const std::shared_ptr<Work>& work);

  // Whether threads that wait also do what the progress thread would: fewer cores than threads.
  bool relieves = false;
  // Looks at a flag before the first yield, and how long it yields before it sleeps; before the first operation.
  void set_patience(int spins, std::uint64_t yield_ns) {
    options_.spins = spins;
    if (!wired) options_.yield_ns = yield_ns;
  }
  // Of the operations that start from now on.
  void set_timeout(std::uint64_t timeout_ns) { timeout_ns_.store(timeout_ns, std::memory_order_relaxed); }
  void close();
  bool closed() const { return closed_; }
  std::string failure() const;
  std::uint64_t operations() const { return operations_; }
  std::uint64_t total_wire_bytes() const { return total_wire_bytes_; }
  // What this rank copied out of its peers' own memory.
  std::uint64_t pulled_bytes() const { return pulled_bytes_.load(std::memory_order_relaxed); }
  // The last operations, oldest first, and what is to be seen of every rank; for reports.
  std::vector<Flight> flights() const;
  std::vector<Sighting> sightings();

  void publish_flag(std::size_t index, std::uint64_t seq, std::uint64_t operation, std::uint32_t checksum) override;
  void publish_done(std::uint64_t pieces) override;
  void send_box(const std::vector<int>& to, std::size_t index, std::size_t slot_offset, const std::uint8_t* data,
                std::size_t bytes) override;
  void wake() override { ring_peers(); }
  std::uint8_t* resolve(int peer, std::int64_t region, std::uint64_t id, std::uint64_t offset,
                        std::size_t bytes) override;
  void pull(int peer, std::uint64_t address, std::uint8_t* out, std::size_t bytes) override;
  void confirm(int peer) override;

  // For the progress thread: one look at the front of the queue. `idle` where there is nothing to drive.
  enum class Look { idle, moved, blocked };
  Look drive_front(int budget);
  // While asleep for the front operation: what it waits for, and whether to give up.
  void watch_front();
  // Whether there is something that nobody drives.
  bool has_work() const;
  // How long a thread that is blocked on this communicator may sleep.
  std::uint64_t nap(std::uint64_t most) const;
  // Readable while peers have something to say that was not read; -1 where all share memory.
  int wire() const { return wire_.fd(); }
  // Peers ring in shared memory too, which wakes nobody who looks at sockets.
  bool mixed() const { return mixed_; }

 private:
  struct Operation {
    Call call;
    std::shared_ptr<Work> work;
    std::uint64_t number = 0;
    std::unique_ptr<Machine> machine;
    std::uint64_t deadline = 0;
    bool alone = false;  // it shares memory with the operation before it
  };

  void require_usable() const;
  std::uint64_t begin(const Call& call, std::uint64_t number);
  std::unique_ptr<Machine> make_machine(Operation& operation);
  Look advance_queue(int budget);
  bool drive_ahead(const Operation& front, int budget);
  void drive(Machine& machine, std::uint64_t deadline);
  void drive_until(const Work& work);
  template <class Looks, class Rests>
  void persist(Patience patience, Looks look, Rests rest);
  bool release();
  void leave();
  void evict_driver();
  std::exception_ptr caught();
  void watch_queue();
  void watch(const Machine& machine, std::uint64_t deadline);
  [[noreturn]] void raise_mismatch(const Machine& machine);
  [[noreturn]] void raise_timeout(const Machine& machine);
  [[noreturn]] void raise_damage(const Machine& machine);
  // Raises what the machine found wrong with the others' words or bytes.
  void check_machine(const Machine& machine) {
    if (machine.mismatch()) raise_mismatch(machine);
    if (machine.damage()) raise_damage(machine);
  }
  void check_failures() const;
  bool dead(int peer, int wait_ms = 0);
  [[noreturn]] void raise_gone(int peer);
  // Before a machine advances: takes in what came over sockets and links.
  void look();
  void fail(const Error& error, int culprit);
  void fail_queue(std::exception_ptr failure);
  void finish_front(std::exception_ptr failure);
  void ring_peers();
  // Of the peers behind sockets (sockets.cpp); nothing is to be done where all share memory.
  const Remote* remote_of(int peer) const;
  void pump();
  bool push_out();
  void doze(Bell& bell, std::uint32_t seen, std::uint64_t timeout_ns);
  void tell(const Machine& machine);
  void tell_failure();
  void take_leave();
  std::string who(int rank) const;

  CommunicatorOptions options_;
  AreaLayout layout_;
  std::unique_ptr<Link> inside_, between_;
  Mapping area_;
  std::uint64_t token_;
  int owner_;  // pid: a forked child's copy is dead
  PeerView own_;
  std::vector<Mapping> peer_areas_;
  std::vector<std::unique_ptr<Peer>> processes_;
  std::vector<int> pidfds_;
  std::mutex remotes_mutex_;                      // whoever drives an operation, and whoever fails or closes
  std::vector<std::unique_ptr<Remote>> remotes_;  // by peer; null where memory is shared, empty where all share it
  Watch wire_;                                    // over their sockets
  bool mixed_ = false;
  std::uint64_t announced_ = 0;  // operations
  std::uint64_t told_ = 0;       // when the peers were told last whom this rank waits for
  std::vector<std::string> names_;
  int suspect_ = -1;  // a dead peer that this rank waits for: one more look, then it is lost
  int culprit_ = -1;  // of the error being raised
  std::atomic<std::uint64_t> timeout_ns_{0};

  mutable std::mutex mutex_;
  std::deque<Operation> queue_;
  bool driven_ = false;         // somebody runs operations: he alone touches their machines, and the front's place
  std::vector<Work*> waiting_;  // for which threads wait that would drive
  std::condition_variable left_;
  std::atomic<bool> closing_{false};
  bool closed_ = false;
  bool failed_ = false;
  ErrorKind failure_kind_ = ErrorKind::none;
  std::string failure_text_;
  std::uint64_t operations_ = 0;
  FlightRing flights_;
  std::uint64_t total_wire_bytes_ = 0;
  std::atomic<std::uint64_t> pulled_bytes_{0};
};

}  // namespace dtcomm
