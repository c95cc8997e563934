#include "engine/remote_peer_set.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/memfd.h"
#include "engine/process_page.h"
#include "net/forked_children.h"

namespace dtcomm {
namespace {

constexpr std::size_t kFewSockets = 4;  // reading them all costs less than asking which are ready
constexpr int kSocketInterval = 64;     // polls of UCX between two of the sockets, which say little then
constexpr std::uint64_t kWaitIntervalNs = 100 * 1000 * 1000;
constexpr std::uint64_t kGoodbyeNs = 2000 * 1000 * 1000ull;  // until what was sent last has arrived
constexpr std::uint64_t kFailedGoodbyeNs = 200 * 1000 * 1000;

}  // namespace

template <class Action>
void RemotePeerSet::for_each_locked(Action action) {
  if (peers_.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& peer : peers_) {
    if (peer) action(*peer);
  }
}

void RemotePeerSet::add(int peer, const std::vector<int>& fds, const RegionLayout& layout, const RegionHeader& own) {
  auto added = std::make_unique<RemotePeer>(fds, layout, own);
  peers_.resize(own.ranks);
  for (std::size_t stream = 0; stream < fds.size(); ++stream) {
    epoll_.add(fds[stream], socket_number(static_cast<std::size_t>(peer), stream));
  }
  has_parallel_sockets_ |= fds.size() > 1;
  keeps_order_ &= added->channel().keeps_order();
  peers_[static_cast<std::size_t>(peer)] = std::move(added);
}

const RemotePeer* RemotePeerSet::find(int peer) const {
  return peers_.empty() ? nullptr : peers_[static_cast<std::size_t>(peer)].get();
}

std::string RemotePeerSet::make_ucx_address() {
  const std::lock_guard<std::mutex> lock(mutex_);
  unconnected_ucx_ = make_ucx_worker(random_token());
  return unconnected_ucx_->address();
}

void RemotePeerSet::connect_ucx(const std::vector<std::string>& addresses, const std::vector<std::string>& names) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ucx_ = std::move(unconnected_ucx_);
  epoll_.add(ucx_->event_fd(), static_cast<int>(peers_.size()));
  for (std::size_t index = 0; index < peers_.size(); ++index) {
    if (!peers_[index]) continue;
    try {
      peers_[index]->connect(*ucx_, addresses[index]);
      keeps_order_ &= peers_[index]->channel().keeps_order();
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(names[index] + ": " + error.what());
    }
  }
}

bool RemotePeerSet::ucx_is_connected(const std::vector<std::string>& names) {
  if (peers_.empty()) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  receive_locked();
  bool connected = true;
  for (std::size_t index = 0; index < peers_.size(); ++index) {
    if (!peers_[index]) continue;
    RemotePeer& peer = *peers_[index];
    const bool queued = peer.flush();
    if (peer.has_ended()) {
      throw std::runtime_error("the connection to " + names[index] + " ended (" + peer.end_reason() + ")");
    }
    connected &= peer.has_greeted() && !queued;
  }
  return connected;
}

std::vector<std::string> RemotePeerSet::ucx_lanes() {
  std::vector<std::string> lanes;
  for_each_locked([&](const RemotePeer& peer) {
    for (std::string& lane : peer.channel().lanes()) {
      if (std::find(lanes.begin(), lanes.end(), lane) == lanes.end()) lanes.push_back(std::move(lane));
    }
  });
  return lanes;
}

void RemotePeerSet::allow_restoring(int event_fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (peers_.empty()) return;
  const int duplicate = fcntl(event_fd, F_DUPFD_CLOEXEC, 0);
  if (duplicate < 0) throw std::system_error(errno, std::generic_category(), "fcntl");
  close_in_children(duplicate);
  if (ended_fd_ >= 0) close_unless_in_child(ended_fd_);
  ended_fd_ = duplicate;
  for (const auto& peer : peers_) {
    if (peer) peer->sockets().allow_restoring();
  }
}

RemotePeer* RemotePeerSet::find_locked(int peer) {
  const auto index = static_cast<std::size_t>(peer);
  return peer < 0 || index >= peers_.size() ? nullptr : peers_[index].get();
}

std::vector<RemotePeerSet::LostConnection> RemotePeerSet::lost_connections() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!peers_.empty()) receive_locked();  // the peer's goodbye may be there
  std::vector<LostConnection> lost;
  for (std::size_t index = 0; index < peers_.size(); ++index) {
    if (!peers_[index]) continue;
    for (StreamBundle::LostStream& stream : peers_[index]->lost_streams()) {
      lost.push_back({static_cast<int>(index), std::move(stream)});
    }
  }
  return lost;
}

bool RemotePeerSet::restore(int peer, std::size_t number, std::uint32_t generation, int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  RemotePeer* const remote = find_locked(peer);
  if (!remote || number >= remote->sockets().streams().size()) return false;
  const std::unique_ptr<FrameStream>& stream = remote->sockets().streams()[number];
  epoll_.remove(stream->fd());
  const int socket = socket_number(static_cast<std::size_t>(peer), number);
  const bool restored = remote->restore(number, generation, fd);
  if (!restored && stream->ended()) return false;
  try {
    epoll_.add(stream->fd(), socket);
    epoll_.watch_writable(stream->fd(), socket, stream->has_queued());
  } catch (const std::exception&) {  // no memory for another descriptor: the stream owns the socket, and ends
    remote->end_stream(number, generation);
    notify_ended(*remote);
  }
  return restored;
}

void RemotePeerSet::end_connection(int peer, std::size_t number, std::uint32_t generation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  RemotePeer* const remote = find_locked(peer);
  if (!remote) return;
  remote->end_stream(number, generation);
  notify_ended(*remote);
}

void RemotePeerSet::give_up(int peer, const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (RemotePeer* const remote = find_locked(peer)) remote->sockets().give_up(reason);
}

std::pair<std::size_t, std::uint64_t> RemotePeerSet::restoring_counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::pair<std::size_t, std::uint64_t> counts{};
  for (const auto& peer : peers_) {
    if (!peer) continue;
    counts.first += peer->lost_streams().size();
    counts.second += peer->sockets().restored();
  }
  return counts;
}

std::vector<double> RemotePeerSet::measured_rates() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<double> rates;
  for (const auto& peer : peers_) rates.push_back(peer ? peer->sockets().measured_rate() : 0.0);
  return rates;
}

// Stops waiting for the sockets of a peer that have ended, and wakes the thread that makes connections anew.
void RemotePeerSet::notify_ended(RemotePeer& peer) {
  for (const auto& stream : peer.sockets().streams()) {
    if (stream->ended()) epoll_.remove(stream->fd());
  }
  const std::uint64_t one = 1;
  if (ended_fd_ >= 0 && ::write(ended_fd_, &one, sizeof one) < 0) return;  // it is full: it is readable already
}

void RemotePeerSet::receive() {
  if (peers_.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  receive_locked();
}

void RemotePeerSet::receive_locked() {
  bool read_sockets = true;
  if (ucx_) {
    ucx_->progress();
    // If the channel to a peer has ended, its socket says why.
    const auto has_ended = [](const auto& peer) { return peer && peer->channel().ended(); };
    read_sockets = ++polls_ >= kSocketInterval || std::any_of(peers_.begin(), peers_.end(), has_ended);
  }
  if (read_sockets) receive_from_sockets();
  for (const auto& peer : peers_) {
    if (!peer) continue;
    peer->read_last_words();
    peer->flush();
  }
}

void RemotePeerSet::receive_from_sockets() {
  polls_ = 0;
  if (peers_.size() <= kFewSockets && !has_parallel_sockets_) {
    for (std::size_t index = 0; index < peers_.size(); ++index) receive_from_socket(index, 0);
  } else {
    std::array<int, EpollSet::kMaxReady> ready;
    const std::size_t count = epoll_.ready(ready);
    for (std::size_t i = 0; i < count; ++i) {
      const auto number = static_cast<std::size_t>(ready[i]);
      receive_from_socket(number % (peers_.size() + 1), number / (peers_.size() + 1));
    }
  }
}

void RemotePeerSet::receive_from_socket(std::size_t index, std::size_t stream) {
  RemotePeer* const peer = index < peers_.size() ? peers_[index].get() : nullptr;
  if (!peer || peer->sockets().streams()[stream]->ended() || !peer->receive(stream)) return;
  notify_ended(*peer);
}

bool RemotePeerSet::flush() {
  if (peers_.empty()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  bool queued = false;
  for (std::size_t index = 0; index < peers_.size(); ++index) {
    RemotePeer* const peer = peers_[index].get();
    if (!peer) continue;
    bool left = peer->flush();
    if (left && ucx_) {
      ucx_->progress();
      left = peer->flush();
    }
    const Streams& streams = peer->sockets().streams();
    for (std::size_t number = 0; number < streams.size(); ++number) {
      const FrameStream& stream = *streams[number];
      if (!stream.ended()) epoll_.watch_writable(stream.fd(), socket_number(index, number), stream.has_queued());
    }
    queued |= left;
  }
  return queued;
}

bool RemotePeerSet::arm() {
  if (!ucx_) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  polls_ = kSocketInterval;  // what wakes the thread may be in a socket
  return ucx_->arm();
}

int RemotePeerSet::awaited_by_sends(const std::uint8_t* begin, const std::uint8_t* end) {
  if (keeps_order_) return -1;  // a peer that is done with a piece has received it
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t index = 0; index < peers_.size(); ++index) {
    if (peers_[index] && peers_[index]->channel().is_sending(begin, end)) return static_cast<int>(index);
  }
  return -1;
}

void RemotePeerSet::send_box(const std::vector<int>& to, const PeerView& own, std::uint64_t last_operation,
                             std::size_t index, std::size_t slot_offset, const std::uint8_t* data, std::size_t bytes) {
  if (peers_.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int rank : to) {
    RemotePeer* const peer = peers_[static_cast<std::size_t>(rank)].get();
    if (!peer) continue;
    std::uint64_t first_ns = 0;
    if (own.stamps) {
      first_ns =
          own.stamps[index * peers_.size() + static_cast<std::size_t>(rank)].first.load(std::memory_order_relaxed);
    }
    peer->send_headers(last_operation);
    peer->send_box(index, own.flags[index], first_ns, data, slot_offset, bytes);
    peer->flush();
  }
}

void RemotePeerSet::send_pieces_done(std::uint64_t pieces) {
  for_each_locked([&](RemotePeer& peer) { peer.send_pieces_done(pieces); });
}

void RemotePeerSet::send_waiting_for(std::uint64_t last_operation, int rank, bool force) {
  if (peers_.empty()) return;
  const std::uint64_t now = now_ns();
  if (!force && wait_sent_ns_ != 0 && now - wait_sent_ns_ < kWaitIntervalNs) return;
  wait_sent_ns_ = now;
  for_each_locked([&](RemotePeer& peer) {
    peer.note_heard(now);
    peer.send_headers(last_operation);
    peer.send_waiting_for(rank);
    peer.flush();
  });
}

void RemotePeerSet::send_failure(std::uint64_t last_operation) {
  for_each_locked([&](RemotePeer& peer) {
    peer.send_headers(last_operation);
    peer.send_failure();
    peer.flush();
  });
}

void RemotePeerSet::start_goodbye(bool failed) {
  for_each_locked([](RemotePeer& peer) {
    peer.flush();
    peer.send_closed();
  });
  goodbye_deadline_ns_ = now_ns() + (failed ? kFailedGoodbyeNs : kGoodbyeNs);
}

bool RemotePeerSet::goodbye_pending() {
  if (peers_.empty()) return false;
  bool unsent = flush();
  if (ucx_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    unsent |= !ucx_->is_flushed();
  }
  for_each_locked([&](RemotePeer& peer) {
    unsent |= peer.sockets().has_unacknowledged() || (peer.is_cut_off() && peer.sockets().has_unsent());
  });
  if (!unsent || now_ns() > goodbye_deadline_ns_) return false;
  receive();  // notices peers that have ended, which are not waited for
  return true;
}

void RemotePeerSet::end_goodbye() {
  for_each_locked([](RemotePeer& peer) { peer.sockets().shutdown_send(); });
}

void RemotePeerSet::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  unconnected_ucx_.reset();
  ucx_.reset();  // first, as it writes into what the peers own and reads this rank's slots
  peers_.clear();
  epoll_.close();
  if (ended_fd_ >= 0) close_unless_in_child(ended_fd_);
  ended_fd_ = -1;
}

}  // namespace dtcomm
