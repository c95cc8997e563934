#include "engine/cache_line_probe.h"

#include <algorithm>

#include "engine/cpu_relax.h"
#include "engine/process_page.h"

namespace dtcomm {
namespace {

constexpr int kLooks = 4000;  // far more than a round trip takes while both are running
constexpr std::uint64_t kStride = 64;
constexpr std::uint64_t kGivenUp = kStride - 1;

}  // namespace

Probe::Probe(int rank, const std::vector<PeerView>& peers, std::uint64_t number)
    : partner_(rank ^ 1), leads_(rank < partner_), base_(number * kStride) {
  if (partner_ >= static_cast<int>(peers.size())) {
    partner_ = -1;
    round_ = kRounds;
    return;
  }
  mine_ = &peers[static_cast<std::size_t>(rank)].head->bounce;
  theirs_ = &peers[static_cast<std::size_t>(partner_)].head->bounce;
}

Probe::State Probe::advance() {
  if (round_ == kRounds) return State::over;
  if (!met_) {
    if (leads_ && !called_) {
      called_ = true;
      mine_->store(base_ + 1, std::memory_order_release);
      return State::met;
    }
    if (theirs_->load(std::memory_order_acquire) < base_ + 1) return State::waiting;
    met_ = true;
    if (!leads_) {
      mine_->store(base_ + 1, std::memory_order_release);
      round_ = 1;
      last_ = now_ns();
      return State::met;
    }
    round_ = 1;
    last_ = now_ns();
  }
  for (; round_ < kRounds; ++round_) {
    const std::uint64_t value = base_ + round_ + 1;
    if (leads_) mine_->store(value, std::memory_order_release);
    int looks = 0;
    std::uint64_t seen = 0;
    while ((seen = theirs_->load(std::memory_order_acquire)) < value && looks < kLooks) {
      ++looks;
      cpu_pause();
    }
    if (looks == kLooks || seen >= base_ + kGivenUp) {
      mine_->store(base_ + kGivenUp, std::memory_order_release);
      round_ = kRounds;
      times_.fill(0);
      return State::over;
    }
    if (!leads_) mine_->store(value, std::memory_order_release);
    const std::uint64_t now = now_ns();
    times_[round_] = static_cast<std::uint32_t>(now - last_);
    last_ = now;
  }
  return State::over;
}

double Probe::round_trip_ns() const {
  if (partner_ < 0) return 0;
  auto sorted = times_;
  std::sort(sorted.begin() + 1, sorted.end());  // the first round is the wait for the partner
  return sorted[kRounds / 2];
}

}  // namespace dtcomm
