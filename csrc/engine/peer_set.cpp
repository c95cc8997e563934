// A communicator's peers on other hosts: their frames, and sleeping until there are some.
#include <time.h>

#include <algorithm>

#include "engine/communicator.h"

namespace dtcomm {
namespace {

constexpr std::size_t kFew = 4;  // sockets: to try them all costs less than to ask which are ready
constexpr std::size_t kMostReady = 64;
constexpr std::uint64_t kMixedNs = 200 * 1000;  // who sleeps over sockets is not woken by peers in shared memory
constexpr std::uint64_t kTellNs = 100 * 1000 * 1000;
constexpr std::uint64_t kLeaveNs = 2000 * 1000 * 1000ull;  // for what was sent last to arrive
constexpr std::uint64_t kFailedLeaveNs = 200 * 1000 * 1000;

}  // namespace

void Communicator::pump() {
  if (remotes_.empty()) return;
  const std::lock_guard<std::mutex> lock(remotes_mutex_);
  const auto take = [this](int peer) {
    Remote* const remote = remotes_[static_cast<std::size_t>(peer)].get();
    if (!remote || remote->stream().ended()) return;
    remote->receive();
    if (remote->stream().ended()) wire_.remove(remote->stream().fd());
  };
  if (remotes_.size() <= kFew) {
    for (int peer = 0; peer < ranks; ++peer) take(peer);
  } else {
    int ready[kMostReady];
    const std::size_t count = wire_.ready(ready, kMostReady);
    for (std::size_t i = 0; i < count; ++i) take(ready[i]);
  }
  for (const auto& remote : remotes_) {
    if (remote && remote->stream().pending()) remote->stream().flush();
  }
}

// Hands over what is still to be sent; true where the kernel did not take all.
bool Communicator::push_out() {
  if (remotes_.empty()) return false;
  const std::lock_guard<std::mutex> lock(remotes_mutex_);
  bool left = false;
  for (int peer = 0; peer < ranks; ++peer) {
    Remote* const remote = remotes_[static_cast<std::size_t>(peer)].get();
    if (!remote || remote->stream().ended()) continue;
    Stream& stream = remote->stream();
    if (stream.pending()) stream.flush();
    wire_.want_room(stream.fd(), peer, stream.pending());
    left |= stream.pending();
  }
  return left;
}

void Communicator::doze(Bell& bell, std::uint32_t seen, std::uint64_t timeout_ns) {
  if (remotes_.empty()) {
    bell.sleep(seen, timeout_ns);
    return;
  }
  push_out();
  const int fd = wire_.fd();
  sleep_on(&fd, 1, mixed_ ? std::min(timeout_ns, kMixedNs) : timeout_ns);
}

void Communicator::send_box(const std::vector<int>& to, std::size_t index, std::size_t slot_offset,
                            const std::uint8_t* data, std::size_t bytes) {
  if (remotes_.empty()) return;
  const std::lock_guard<std::mutex> lock(remotes_mutex_);
  for (const int peer : to) {
    Remote* const remote = remotes_[static_cast<std::size_t>(peer)].get();
    if (!remote) continue;
    const std::uint64_t first =
        own_.stamps ? own_.stamps[index * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(peer)].first.load(
                          std::memory_order_relaxed)
                    : 0;
    remote->send_headers(*own_.head, announced_);
    remote->send_box(index, own_.flags[index], first, data, slot_offset, bytes);
    remote->stream().flush();
  }
}

// What peers find out by a look where memory is shared: what this rank is about to do, and whom it waits for.
void Communicator::tell(const Machine& machine) {
  if (remotes_.empty()) return;
  const std::uint64_t now = now_ns();
  if (told_ != 0 && now - told_ < kTellNs) return;
  told_ = now;
  const std::lock_guard<std::mutex> lock(remotes_mutex_);
  for (const auto& remote : remotes_) {
    if (!remote) continue;
    remote->send_headers(*own_.head, announced_);
    remote->send_waiting(machine.blocker());
    remote->stream().flush();
  }
}

void Communicator::tell_failure() {
  if (remotes_.empty()) return;
  const std::lock_guard<std::mutex> lock(remotes_mutex_);
  for (const auto& remote : remotes_) {
    if (!remote) continue;
    remote->send_headers(*own_.head, announced_);
    remote->send_failure(own_.head->failure);
    remote->stream().flush();
  }
}

// The peers may still need what was sent last: it leaves before the connections are closed.
void Communicator::take_leave() {
  if (remotes_.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(remotes_mutex_);
    for (const auto& remote : remotes_) {
      if (remote) remote->send_closed();
    }
  }
  const std::uint64_t until = now_ns() + (failed_ ? kFailedLeaveNs : kLeaveNs);
  for (;;) {
    bool left = push_out();
    for (const auto& remote : remotes_) left |= remote && remote->stream().unsent() > 0;
    if (!left || now_ns() > until) break;
    pump();  // a peer that ended stands in nobody's way
    const timespec moment{0, 1000 * 1000};
    nanosleep(&moment, nullptr);
  }
  for (const auto& remote : remotes_) {
    if (remote) remote->stream().shut();
  }
}

}  // namespace dtcomm
