// All thread blocks of a launch on one CPU thread: their lanes take turns in an order that a seed decides. A lane runs
// until it has to wait (for its warp, its block or a signal), so every order of what lies between two such points can
// come about, and extreme ones do: warps have priorities, now and then drawn anew, and the first that can go on does.
// Memory is as the CPU's: what an earlier lane has stored, a later one reads. Time stands still: a wait ends without
// its signal where nobody can go on otherwise. What a weaker memory would allow is told to a Watch.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "codec/counter_rng.h"
#include "cuda/fused/host/stacks.h"
#include "cuda/fused/host/watch.h"
#include "cuda/fused/peers.cuh"

namespace dtcomm::cuda {

class Swarm {
 public:
  static constexpr unsigned kThreads = 64;  // of a block: two warps

  explicit Swarm(unsigned most_blocks)
      : lanes_(most_blocks * kThreads),
        stacks_(most_blocks * kThreads),
        warps_(lanes_.size() / kWarp),
        blocks_(most_blocks),
        streams_(most_blocks) {}

  // Told from now on; nullptr: nobody.
  void watch(Watch* watch) { watch_ = watch; }

  // What is done while it lives is a lane's doing, between two calls of the swarm.
  class Inside {
   public:
    explicit Inside(Swarm& swarm) : swarm_(swarm) { swarm_.enter(); }
    ~Inside() { swarm_.leave(); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Swarm& swarm_;
  };

  // body(block) for all threads of `blocks` blocks. Returns nullptr, or how the lanes came apart.
  const char* run(unsigned blocks, std::uint64_t seed, const std::function<void(unsigned)>& body) {
    random_ = mix_key(seed, 0, 0) | 1;
    best_ = nullptr;
    failure_ = nullptr;
    running_ = blocks * kThreads;
    waiting_.clear();
    for (unsigned lane = 0; lane < running_; ++lane) lanes_[lane] = Lane();
    for (unsigned block = 0; block < blocks; ++block) {
      blocks_[block].clear();
      streams_[block].clear();
    }
    used_ = running_ / kWarp;
    for (unsigned warp = 0; warp < used_; ++warp) {
      warps_[warp] = Warp();
      warps_[warp].priority = draw();
      std::vector<unsigned>& ready = warps_[warp].ready;
      for (unsigned lane = 0; lane < kWarp; ++lane) ready.push_back(warp * kWarp + lane);
      for (unsigned lane = 1; lane < kWarp; ++lane) std::swap(ready[lane], ready[draw() % (lane + 1)]);
    }
    if (watch_) {
      watch_->constant(this, sizeof *this);
      watch_->stacks(stacks_.memory(), Stacks::kStack);
    }
    const unsigned count = running_;
    stacks_.run(
        count, next(), [&](unsigned lane) { body(lane / kThreads); },
        [&](unsigned) { return --running_ ? next() : Stacks::kNobody; });
    return failure_;
  }

  unsigned thread() const { return stacks_.current() % kThreads; }

  // Returns when all lanes of the warp have left a value; `what` must be the same for all. It orders no memory.
  template <class T>
  T exchange(T value, unsigned reach, int what, bool orders = false) {
    const Outside outside(*this);
    const unsigned current = stacks_.current();
    Lane& lane = lanes_[current];
    const unsigned side = lane.turn++ % 2;
    std::memcpy(&lane.slot[side], &value, sizeof value);
    lane.what[side] = what;
    Warp& warp = warps_[current / kWarp];
    meet(warp.met, kWarp, orders);
    const Lane& other = lanes_[current ^ reach];
    if (other.what[side] != what) fail("lanes of a warp came to different exchanges");
    T result;
    std::memcpy(&result, &other.slot[side], sizeof result);
    return result;
  }

  void barrier() {
    const Outside outside(*this);
    meet(blocks_[stacks_.current() / kThreads], kThreads, true);
  }

  // All threads of `blocks` blocks meet, of which the lane's is one and `first` is the first: launches of a stream,
  // one behind the other if they are `ordered`.
  void follow(unsigned first, unsigned blocks, bool ordered) {
    meet(streams_[first], std::size_t{blocks} * kThreads, ordered);
  }

  // Strong accesses. A signal is a release, or what is left of one; look and wait acquire.
  void note(std::uint32_t* word, std::uint32_t value, Scope scope) {
    const Outside outside(*this);
    if (watch_) watch_->store(stacks_.current(), word, value, false, scope);
    *word = value;
  }
  std::uint32_t look(const std::uint32_t* word, bool acquires, Scope scope) {
    const Outside outside(*this);
    if (watch_) watch_->load(stacks_.current(), word, *word, acquires, scope);
    return *word;
  }

  void signal(std::uint32_t* word, std::uint32_t value, bool releases, Scope scope) {
    const Outside outside(*this);
    if (watch_) watch_->store(stacks_.current(), word, value, releases, scope);
    *word = value;
    for (std::size_t i = 0; i < waiting_.size();) {
      if (come(waiting_[i])) {
        make_ready(waiting_[i].lane);
        waiting_[i] = waiting_.back();
        waiting_.pop_back();
      } else {
        ++i;
      }
    }
    // Whoever waited for it may overtake.
    if (draw() % 2) give_way();
  }

  bool wait(const std::uint32_t* word, std::uint32_t value, bool acquires, Scope scope) {
    const Outside outside(*this);
    const Wait wait{stacks_.current(), word, value};
    if (!come(wait)) {
      waiting_.push_back(wait);
      stacks_.hand_on(next());
    }
    if (watch_) watch_->load(wait.lane, word, value, acquires && come(wait), scope);
    return come(wait);
  }

 private:
  // The opposite of Inside, for what a lane calls.
  class Outside {
   public:
    explicit Outside(Swarm& swarm) : swarm_(swarm) { swarm_.leave(); }
    ~Outside() { swarm_.enter(); }
    Outside(const Outside&) = delete;
    Outside& operator=(const Outside&) = delete;

   private:
    Swarm& swarm_;
  };

  void enter() {
    if (watch_) watch_->enter(stacks_.current());
  }
  void leave() {
    if (watch_) watch_->leave();
  }

  struct Lane {
    unsigned turn = 0;
    std::uint64_t slot[2] = {};
    int what[2] = {};
  };
  struct Warp {
    std::vector<unsigned> ready, met;
    std::uint64_t priority = 0;
  };
  struct Wait {
    unsigned lane;
    const std::uint32_t* word;
    std::uint32_t value;
  };

  static bool come(const Wait& wait) { return static_cast<std::int32_t>(*wait.word - wait.value) >= 0; }

  [[noreturn]] void fail(const char* what) {
    failure_ = what;
    stacks_.abandon();
  }

  void make_ready(unsigned lane) {
    Warp& warp = warps_[lane / kWarp];
    warp.ready.push_back(lane);
    prefer(warp);
  }

  void meet(std::vector<unsigned>& met, std::size_t all, bool orders) {
    const unsigned current = stacks_.current();
    met.push_back(current);
    if (met.size() < all) return stacks_.hand_on(next());
    if (watch_ && orders) watch_->meet(met);
    for (const unsigned lane : met) {
      if (lane != current) make_ready(lane);
    }
    met.clear();
    // The last to come may go on at once.
    if (all == kWarp || draw() % 2) return;
    give_way();
  }

  void give_way() {
    make_ready(stacks_.current());
    stacks_.hand_on(next());
  }

  // Takes the lane that goes on out of its warp's ready ones.
  unsigned next() {
    if (draw() % 256 == 0) {
      warps_[draw() % used_].priority = draw();
      best_ = nullptr;
    }
    if (!best_ || best_->ready.empty()) {
      best_ = nullptr;
      for (unsigned warp = 0; warp < used_; ++warp) prefer(warps_[warp]);
    }
    if (!best_) {
      if (waiting_.empty()) fail("a barrier that not all lanes come to");
      for (const Wait& wait : waiting_) make_ready(wait.lane);  // their time is up
      waiting_.clear();
    }
    const unsigned lane = best_->ready.back();
    best_->ready.pop_back();
    return lane;
  }

  void prefer(Warp& warp) {
    if (!warp.ready.empty() && (!best_ || warp.priority > best_->priority)) best_ = &warp;
  }

  // xorshift (Marsaglia 2003)
  std::uint64_t draw() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    return random_ ^= random_ << 17;
  }

  Watch* watch_ = nullptr;
  std::uint64_t random_ = 1;
  Warp* best_ = nullptr;  // of those that can go on
  std::vector<Lane> lanes_;
  Stacks stacks_;
  std::vector<Warp> warps_;
  std::vector<std::vector<unsigned>> blocks_;   // the lanes that have come to its barrier
  std::vector<std::vector<unsigned>> streams_;  // that have come to the end of a launch; by the first block
  std::vector<Wait> waiting_;
  unsigned running_ = 0, used_ = 0;
  const char* failure_ = nullptr;
};

}  // namespace dtcomm::cuda
