#include "emulator/scheduler.h"

#include <cstddef>
#include <utility>

#include "codec/counter_rng.h"

namespace dtcomm::emulator {

Status Scheduler::run(unsigned blocks, unsigned threads, std::uint64_t seed, const std::function<void(unsigned)>& body,
                      unsigned first_lane) {
  random_ = mix_key(seed, 0, 0) | 1;
  best_ = nullptr;
  failure_ = nullptr;
  threads_ = threads;
  first_lane_ = first_lane;
  barriers_ = 0;
  running_ = blocks * threads;
  waits_.clear();
  for (unsigned lane = 0; lane < running_; ++lane) lanes_[lane] = Lane();
  for (unsigned block = 0; block < blocks; ++block) {
    blocks_[block].clear();
    streams_[block].clear();
  }
  used_warps_ = running_ / kWarpLanes;
  for (unsigned warp = 0; warp < used_warps_; ++warp) {
    std::vector<unsigned>& ready = warps_[warp].ready;
    ready.clear();
    warps_[warp].arrived.clear();
    warps_[warp].priority = draw();
    for (unsigned lane = 0; lane < kWarpLanes; ++lane) ready.push_back(warp * kWarpLanes + lane);
    for (unsigned lane = 1; lane < kWarpLanes; ++lane) std::swap(ready[lane], ready[draw() % (lane + 1)]);
  }
  if (observer_) {
    observer_->constant(this, sizeof *this);
    observer_->stacks(fibers_.stacks() - static_cast<std::ptrdiff_t>(first_lane * Fibers::kStackBytes),
                      Fibers::kStackBytes);
  }
  const unsigned count = running_;
  fibers_.run(
      count, take_next_lane(), [&](unsigned lane) { body(lane / threads); },
      [&](unsigned) { return --running_ ? take_next_lane() : Fibers::kNone; });
  return failure_ ? Status::error(failure_) : Status();
}

void Scheduler::sync_block() {
  const SchedulerScope scope(*this);
  std::vector<unsigned>& arrived = blocks_[fibers_.current() / threads_];
  const bool last = arrived.size() + 1 == threads_;
  wait_for_all(arrived, threads_, !last || barriers_++ != hidden_barrier_);
}

void Scheduler::sync_stream(unsigned first, unsigned blocks, bool ordered) {
  wait_for_all(streams_[first], std::size_t{blocks} * threads_, ordered);
}

void Scheduler::store_relaxed(std::uint32_t* word, std::uint32_t value, Scope scope) {
  const SchedulerScope own(*this);
  if (observer_) observer_->store(first_lane_ + fibers_.current(), word, value, false, scope);
  *word = value;
}

std::uint32_t Scheduler::load(const std::uint32_t* word, bool acquires, Scope scope) {
  const SchedulerScope own(*this);
  if (observer_) observer_->load(first_lane_ + fibers_.current(), word, *word, acquires, scope);
  return *word;
}

void Scheduler::signal(std::uint32_t* word, std::uint32_t value, bool releases, Scope scope) {
  const SchedulerScope own(*this);
  if (observer_) observer_->store(first_lane_ + fibers_.current(), word, value, releases, scope);
  *word = value;
  for (std::size_t i = 0; i < waits_.size();) {
    if (is_over(waits_[i])) {
      make_ready(waits_[i].lane);
      waits_[i] = waits_.back();
      waits_.pop_back();
    } else {
      ++i;
    }
  }
  // A lane that waited for the signal may overtake.
  if (draw() % 2) yield();
}

bool Scheduler::wait(const std::uint32_t* word, std::uint32_t value, bool acquires, Scope scope) {
  const SchedulerScope own(*this);
  const Wait wait{fibers_.current(), word, value};
  if (!is_over(wait)) {
    waits_.push_back(wait);
    fibers_.switch_to(take_next_lane());
  }
  if (observer_) observer_->load(first_lane_ + wait.lane, word, value, acquires && is_over(wait), scope);
  return is_over(wait);
}

void Scheduler::wait_for_all(std::vector<unsigned>& arrived, std::size_t count, bool orders_memory) {
  const unsigned current = fibers_.current();
  arrived.push_back(current);
  if (arrived.size() < count) return fibers_.switch_to(take_next_lane());
  if (observer_ && orders_memory) {
    std::vector<unsigned> lanes = arrived;
    for (unsigned& lane : lanes) lane += first_lane_;
    observer_->barrier(lanes);
  }
  for (const unsigned lane : arrived) {
    if (lane != current) make_ready(lane);
  }
  arrived.clear();
  // The lane that came last may continue at once.
  if (count == kWarpLanes || draw() % 2) return;
  yield();
}

void Scheduler::yield() {
  make_ready(fibers_.current());
  fibers_.switch_to(take_next_lane());
}

// Removes the lane that runs next from its warp's ready lanes.
unsigned Scheduler::take_next_lane() {
  if (draw() % 256 == 0) {
    warps_[draw() % used_warps_].priority = draw();
    best_ = nullptr;
  }
  if (!best_ || best_->ready.empty()) {
    best_ = nullptr;
    for (unsigned warp = 0; warp < used_warps_; ++warp) prefer(warps_[warp]);
  }
  if (!best_) {
    if (waits_.empty()) fail("not all lanes came to a barrier");
    for (const Wait& wait : waits_) make_ready(wait.lane);  // their time is up
    waits_.clear();
  }
  const unsigned lane = best_->ready.back();
  best_->ready.pop_back();
  return lane;
}

}  // namespace dtcomm::emulator
