// Scheduler: runs the threads ("lanes") of one or more CUDA thread blocks as fibers of one CPU thread, in an order that
// a seed decides. A lane runs until it has to wait for its warp, its block, its stream or a signal, so every order of
// what lies between two such points is possible. Extreme orders are likely: warps have random priorities, which now and
// then change, and the ready warp of highest priority runs.
//
// Memory is the CPU's: a lane reads what an earlier lane stored. What a weaker memory model would allow is for a
// MemoryObserver to find. Time does not pass: a wait gives up when no lane can continue otherwise.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "core/status.h"
#include "emulator/fibers.h"
#include "emulator/memory_observer.h"

namespace dtcomm::emulator {

class Scheduler {
 public:
  static constexpr unsigned kWarpLanes = 32;

  explicit Scheduler(unsigned max_lanes)
      : lanes_(max_lanes),
        fibers_(max_lanes),
        warps_(max_lanes / kWarpLanes),
        blocks_(max_lanes / kWarpLanes),
        streams_(max_lanes / kWarpLanes) {}

  // Reports to `observer` from now on; nullptr: to none.
  void observe(MemoryObserver* observer) { observer_ = observer; }
  // Hides the n-th barrier of each block from the observer; -1 hides none. Lanes still wait for each other there.
  void hide_barrier(int barrier) { hidden_barrier_ = barrier; }
  // Barriers that the blocks of the last run came to.
  int barriers() const { return barriers_; }

  // While it exists, the program's memory accesses are those of the current lane.
  class LaneScope {
   public:
    explicit LaneScope(Scheduler& scheduler) : scheduler_(scheduler) { scheduler_.enter(); }
    ~LaneScope() { scheduler_.leave(); }
    LaneScope(const LaneScope&) = delete;
    LaneScope& operator=(const LaneScope&) = delete;

   private:
    Scheduler& scheduler_;
  };

  // Runs body(block) on all threads of `blocks` blocks of `threads` threads, a multiple of a warp. The observer knows
  // them as lanes `first_lane` onwards. An error says how the lanes diverged.
  Status run(unsigned blocks, unsigned threads, std::uint64_t seed, const std::function<void(unsigned)>& body,
             unsigned first_lane = 0);

  unsigned thread() const { return fibers_.current() % threads_; }
  unsigned threads() const { return threads_; }

  // The value of the warp's lane `thread() ^ mask`. Returns when all lanes of the warp have given theirs; `tag` must be
  // the same for all of them. Orders no memory, unless it is to.
  template <class T>
  T exchange(T value, unsigned mask, int tag, bool orders_memory = false) {
    static_assert(sizeof(T) <= sizeof(std::uint64_t), "fits a slot");
    const SchedulerScope scope(*this);
    const unsigned current = fibers_.current();
    Lane& lane = lanes_[current];
    const unsigned side = lane.exchanges++ % 2;
    std::memcpy(&lane.slot[side], &value, sizeof value);
    lane.tag[side] = tag;
    wait_for_all(warps_[current / kWarpLanes].arrived, kWarpLanes, orders_memory);
    const Lane& other = lanes_[current ^ mask];
    if (other.tag[side] != tag) fail("lanes of a warp came to different exchanges");
    T result;
    std::memcpy(&result, &other.slot[side], sizeof result);
    return result;
  }

  void sync_block();
  // Waits for all threads of `blocks` blocks beginning with `first`: launches of one stream follow each other. They
  // order memory where `ordered`.
  void sync_stream(unsigned first, unsigned blocks, bool ordered);

  // Strong accesses. A signal is a release where `releases`; loads and waits acquire where `acquires`.
  void store_relaxed(std::uint32_t* word, std::uint32_t value, Scope scope);
  std::uint32_t load(const std::uint32_t* word, bool acquires, Scope scope);
  void signal(std::uint32_t* word, std::uint32_t value, bool releases, Scope scope);
  // False where the signal can no longer come.
  bool wait(const std::uint32_t* word, std::uint32_t value, bool acquires, Scope scope);

 private:
  // The opposite of LaneScope: the scheduler's own accesses.
  class SchedulerScope {
   public:
    explicit SchedulerScope(Scheduler& scheduler) : scheduler_(scheduler) { scheduler_.leave(); }
    ~SchedulerScope() { scheduler_.enter(); }
    SchedulerScope(const SchedulerScope&) = delete;
    SchedulerScope& operator=(const SchedulerScope&) = delete;

   private:
    Scheduler& scheduler_;
  };
  struct Lane {
    unsigned exchanges = 0;
    std::uint64_t slot[2] = {};
    int tag[2] = {};
  };
  struct Warp {
    std::vector<unsigned> ready, arrived;
    std::uint64_t priority = 0;
  };
  struct Wait {
    unsigned lane;
    const std::uint32_t* word;
    std::uint32_t value;
  };

  static bool is_over(const Wait& wait) { return static_cast<std::int32_t>(*wait.word - wait.value) >= 0; }

  void enter() {
    if (observer_) observer_->enter(first_lane_ + fibers_.current());
  }
  void leave() {
    if (observer_) observer_->leave();
  }
  [[noreturn]] void fail(const char* what) {
    failure_ = what;
    fibers_.abandon();
  }
  void make_ready(unsigned lane) {
    Warp& warp = warps_[lane / kWarpLanes];
    warp.ready.push_back(lane);
    prefer(warp);
  }
  void prefer(Warp& warp) {
    if (!warp.ready.empty() && (!best_ || warp.priority > best_->priority)) best_ = &warp;
  }
  void wait_for_all(std::vector<unsigned>& arrived, std::size_t count, bool orders_memory);
  void yield();
  unsigned take_next_lane();
  std::uint64_t draw() {  // xorshift (Marsaglia 2003)
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    return random_ ^= random_ << 17;
  }

  MemoryObserver* observer_ = nullptr;
  std::uint64_t random_ = 1;
  Warp* best_ = nullptr;  // of those that have ready lanes
  std::vector<Lane> lanes_;
  Fibers fibers_;
  std::vector<Warp> warps_;
  std::vector<std::vector<unsigned>> blocks_;   // lanes that have arrived at a block's barrier
  std::vector<std::vector<unsigned>> streams_;  // lanes that have ended a launch; by the stream's first block
  std::vector<Wait> waits_;
  unsigned running_ = 0, used_warps_ = 0, threads_ = kWarpLanes, first_lane_ = 0;
  int barriers_ = 0, hidden_barrier_ = -1;
  const char* failure_ = nullptr;
};

}  // namespace dtcomm::emulator
