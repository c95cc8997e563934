#include "engine/tcp_peer_set.h"

#include <utility>

#include "engine/process_page.h"

namespace dtcomm {
namespace {

constexpr std::size_t kFewPeers = 4;  // reading all of their sockets costs less than asking which are ready
constexpr std::size_t kMaxReady = 64;
constexpr std::uint64_t kWaitIntervalNs = 100 * 1000 * 1000;
constexpr std::uint64_t kGoodbyeNs = 2000 * 1000 * 1000ull;  // until what was sent last has arrived
constexpr std::uint64_t kFailedGoodbyeNs = 200 * 1000 * 1000;

}  // namespace

template <class Action>
void TcpPeerSet::for_each_locked(Action action) {
  if (peers_.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& peer : peers_) {
    if (peer) action(*peer);
  }
}

void TcpPeerSet::add(int peer, int fd, const RegionLayout& layout, const RegionHeader& own) {
  auto added = std::make_unique<TcpPeer>(fd, layout, own);
  epoll_.add(fd, peer);
  peers_.resize(own.ranks);
  peers_[static_cast<std::size_t>(peer)] = std::move(added);
}

const TcpPeer* TcpPeerSet::find(int peer) const {
  return peers_.empty() ? nullptr : peers_[static_cast<std::size_t>(peer)].get();
}

void TcpPeerSet::receive() {
  if (peers_.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto receive_from = [this](std::size_t index) {
    TcpPeer* const peer = peers_[index].get();
    if (!peer || peer->stream().ended()) return;
    peer->receive();
    if (peer->stream().ended()) epoll_.remove(peer->stream().fd());
  };
  if (peers_.size() <= kFewPeers) {
    for (std::size_t index = 0; index < peers_.size(); ++index) receive_from(index);
  } else {
    int ready[kMaxReady];
    const std::size_t count = epoll_.ready(ready, kMaxReady);
    for (std::size_t i = 0; i < count; ++i) receive_from(static_cast<std::size_t>(ready[i]));
  }
  for (const auto& peer : peers_) {
    if (peer && peer->stream().has_queued()) peer->stream().flush();
  }
}

bool TcpPeerSet::flush() {
  if (peers_.empty()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  bool queued = false;
  for (std::size_t index = 0; index < peers_.size(); ++index) {
    if (!peers_[index] || peers_[index]->stream().ended()) continue;
    FrameStream& stream = peers_[index]->stream();
    if (stream.has_queued()) stream.flush();
    epoll_.watch_writable(stream.fd(), static_cast<int>(index), stream.has_queued());
    queued |= stream.has_queued();
  }
  return queued;
}

void TcpPeerSet::send_box(const std::vector<int>& to, const PeerView& own, std::uint64_t last_operation,
                          std::size_t index, std::size_t slot_offset, const std::uint8_t* data, std::size_t bytes) {
  if (peers_.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int rank : to) {
    TcpPeer* const peer = peers_[static_cast<std::size_t>(rank)].get();
    if (!peer) continue;
    std::uint64_t first_ns = 0;
    if (own.stamps) {
      first_ns =
          own.stamps[index * peers_.size() + static_cast<std::size_t>(rank)].first.load(std::memory_order_relaxed);
    }
    peer->send_headers(*own.header, last_operation);
    peer->send_box(index, own.flags[index], first_ns, data, slot_offset, bytes);
    peer->stream().flush();
  }
}

void TcpPeerSet::send_pieces_done(std::uint64_t pieces) {
  for_each_locked([&](TcpPeer& peer) { peer.send_pieces_done(pieces); });
}

void TcpPeerSet::send_waiting_for(const RegionHeader& own, std::uint64_t last_operation, int rank, bool force) {
  if (peers_.empty()) return;
  const std::uint64_t now = now_ns();
  if (!force && wait_sent_ns_ != 0 && now - wait_sent_ns_ < kWaitIntervalNs) return;
  wait_sent_ns_ = now;
  for_each_locked([&](TcpPeer& peer) {
    peer.send_headers(own, last_operation);
    peer.send_waiting_for(rank);
    peer.stream().flush();
  });
}

void TcpPeerSet::send_failure(const RegionHeader& own, std::uint64_t last_operation) {
  for_each_locked([&](TcpPeer& peer) {
    peer.send_headers(own, last_operation);
    peer.send_failure(own.failure);
    peer.stream().flush();
  });
}

void TcpPeerSet::start_goodbye(bool failed) {
  for_each_locked([](TcpPeer& peer) { peer.send_closed(); });
  goodbye_deadline_ns_ = now_ns() + (failed ? kFailedGoodbyeNs : kGoodbyeNs);
}

bool TcpPeerSet::goodbye_pending() {
  bool unsent = flush();
  for (const auto& peer : peers_) unsent |= peer && peer->stream().unacknowledged() > 0;
  if (!unsent || now_ns() > goodbye_deadline_ns_) return false;
  receive();  // notices peers that have ended, which are not waited for
  return true;
}

void TcpPeerSet::end_goodbye() {
  for (const auto& peer : peers_) {
    if (peer) peer->stream().shutdown_send();
  }
}

void TcpPeerSet::close() {
  peers_.clear();
  epoll_.close();
}

}  // namespace dtcomm
