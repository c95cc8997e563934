#include "engine/cache_line_probe.h"

#include <algorithm>

#include "engine/cpu_relax.h"
#include "engine/process_page.h"

namespace dtcomm {
namespace {

constexpr int kMaxPolls = 4000;  // far more than a round trip takes while both ranks run
constexpr std::uint64_t kStride = 64;
constexpr std::uint64_t kGivenUp = kStride - 1;

}  // namespace

CacheLineProbe::CacheLineProbe(int rank, const std::vector<PeerView>& peers, std::uint64_t number)
    : partner_(rank ^ 1), leads_(rank < partner_), base_(number * kStride) {
  if (partner_ >= static_cast<int>(peers.size())) {
    partner_ = -1;
    round_ = kRounds;
    return;
  }
  own_counter_ = &peers[static_cast<std::size_t>(rank)].header->probe_counter;
  partner_counter_ = &peers[static_cast<std::size_t>(partner_)].header->probe_counter;
}

CacheLineProbe::State CacheLineProbe::advance() {
  if (round_ == kRounds) return State::finished;
  if (!partner_started_) {
    if (leads_ && !signalled_) {
      signalled_ = true;
      own_counter_->store(base_ + 1, std::memory_order_release);
      return State::signalled;
    }
    if (partner_counter_->load(std::memory_order_acquire) < base_ + 1) return State::waiting;
    partner_started_ = true;
    if (!leads_) {
      own_counter_->store(base_ + 1, std::memory_order_release);
      round_ = 1;
      last_ns_ = now_ns();
      return State::signalled;
    }
    round_ = 1;
    last_ns_ = now_ns();
  }
  for (; round_ < kRounds; ++round_) {
    const std::uint64_t value = base_ + round_ + 1;
    if (leads_) own_counter_->store(value, std::memory_order_release);
    int polls = 0;
    std::uint64_t seen = 0;
    while ((seen = partner_counter_->load(std::memory_order_acquire)) < value && polls < kMaxPolls) {
      ++polls;
      cpu_relax();
    }
    if (polls == kMaxPolls || seen >= base_ + kGivenUp) {
      own_counter_->store(base_ + kGivenUp, std::memory_order_release);
      round_ = kRounds;
      times_.fill(0);
      return State::finished;
    }
    if (!leads_) own_counter_->store(value, std::memory_order_release);
    const std::uint64_t now = now_ns();
    times_[round_] = static_cast<std::uint32_t>(now - last_ns_);
    last_ns_ = now;
  }
  return State::finished;
}

double CacheLineProbe::round_trip_ns() const {
  if (partner_ < 0) return 0;
  auto sorted = times_;
  std::sort(sorted.begin() + 1, sorted.end());  // the first round includes the wait for the partner
  return sorted[kRounds / 2];
}

}  // namespace dtcomm
