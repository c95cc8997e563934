// Owners: the communicator owns the PeerSet. The PeerSet owns this rank's region, the mappings of the peers' regions
// and tensors, the handles of their processes, the emulated links and, in `remote_`, the sockets. `peers` and `links`
// only point into these.
//
// Threads: attach(), close() and snapshots() run under Communicator::attached_mutex_, snapshots() in any thread. The
// driver (operation_queue.h) calls receive(), sleep(), send_waiting_for() and the methods of Transport; there is one
// driver at a time, so they take no lock here. close() runs after the last driver has left and the progress thread has
// let go of the communicator. The thread that makes connections anew uses remote() at any time.
//
// Locks: RemotePeerSet's mutex is taken behind attached_mutex_ and the progress thread's mutex. Under it, no other lock
// of the engine is taken.
//
// End of an operation: FailureMonitor decides it before a driver sleeps, from the failures and ends that this object
// reports. Only access to a peer's tensors throws here, because the memory of a process that has ended is gone.
#include "engine/peer_set.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/platform.h"

namespace dtcomm {
namespace {

constexpr int kExitingMs = 1000;  // at most, on a busy machine, between a process's memory going away and its end

}  // namespace

PeerSet::PeerSet(const PeerSetOptions& options) : token_(random_token()) {
  rank = options.rank;
  ranks = options.ranks;
  wide_area = options.wide_area;
  layout_ = {static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(ranks), options.max_boxes, options.slot_bytes,
             options.inside.enabled() || options.between.enabled()};
  region_ = MemfdMapping::create("dtcomm-region", layout_.bytes());
  own_ = construct_region(region_.data(), layout_);
  const auto link_of = [&](const LinkRate& rate, int level) -> std::unique_ptr<EmulatedLink> {
    if (!rate.enabled()) return nullptr;
    return std::make_unique<EmulatedLink>(rate, EmulatedNic::shared(level), ranks, layout_.flags());
  };
  inside_ = link_of(options.inside, 0);
  between_ = link_of(options.between, 1);
  RegionHeader& header = *own_.header;
  header.magic = kRegionMagic;
  header.bytes = layout_.bytes();
  header.rank = layout_.rank;
  header.ranks = layout_.ranks;
  header.max_boxes = options.max_boxes;
  header.token = token_;
}

PeerAddress PeerSet::address() const {
  LocalProcess& process = LocalProcess::instance();
  const auto page = reinterpret_cast<std::uintptr_t>(&process.page());
  return {static_cast<int>(getpid()), process.fd(), process.page().token, page, region_.fd(), token_, {}, false, ""};
}

void PeerSet::attach(const std::vector<PeerAddress>& addresses) {
  if (addresses.size() != static_cast<std::size_t>(ranks)) throw std::invalid_argument("attach: one address per rank");
  // Sockets first: this object owns them from here on, whatever fails below.
  for (int peer = 0; peer < ranks; ++peer) {
    const PeerAddress& address = addresses[static_cast<std::size_t>(peer)];
    if (address.sockets.empty()) continue;
    RegionLayout layout = layout_;
    layout.rank = static_cast<std::uint32_t>(peer);
    try {
      remote_.add(peer, address.sockets, layout, *own_.header);
    } catch (...) {
      for (auto later = addresses.begin() + peer + 1; later != addresses.end(); ++later) {
        for (const int socket : later->sockets) ::close(socket);
      }
      throw;
    }
  }
  links.assign(layout_.emulates_link ? addresses.size() : 0, nullptr);
  has_latency = !remote_.empty();  // frames take time, with or without an emulated link
  for (int peer = 0; peer < ranks; ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    const PeerAddress& address = addresses[index];
    names_.push_back(address.name);
    peer_regions_.emplace_back();
    processes_.emplace_back();
    if (peer == rank) {
      peers.push_back(own_);
      continue;
    }
    if (layout_.emulates_link) {
      links[index] = address.other_host ? between_.get() : inside_.get();
      has_latency |= links[index] != nullptr;
      if (links[index] && !address.sockets.empty()) links[index]->skip_cpu_time(peer);
    }
    if (!address.sockets.empty()) {
      peers.push_back(remote_.find(peer)->view());
    } else {
      mixed_ = !remote_.empty();
      map_peer(peer, address);
    }
  }
}

void PeerSet::map_peer(int peer, const PeerAddress& address) {
  RegionLayout layout = layout_;
  layout.rank = static_cast<std::uint32_t>(peer);
  // First, so that the region's token, too, is read after the process was opened.
  processes_.back() =
      std::make_unique<PeerProcess>(address.pid, address.page_fd, address.page_token, address.page_address);
  peer_regions_.back() = MemfdMapping::attach(address.pid, address.region_fd, layout.bytes());
  const PeerView view = view_of(peer_regions_.back().data(), layout);
  if (view.header->magic != kRegionMagic || view.header->token != address.region_token ||
      view.header->rank != static_cast<std::uint32_t>(peer) || view.header->bytes != layout.bytes()) {
    throw std::runtime_error("shared memory of " + address.name + " is not what it announced");
  }
  peers.push_back(view);
}

void PeerSet::close() {
  peers.clear();  // before the memory that the views point to
  peer_regions_.clear();
  processes_.clear();
  remote_.close();  // before this rank's region, which UCX may be reading
  links.clear();
  inside_.reset();
  between_.reset();
  region_.reset();
}

std::string PeerSet::name(int peer) const {
  const auto index = static_cast<std::size_t>(peer);
  return index < names_.size() ? names_[index] : "rank " + std::to_string(peer);
}

Status PeerSet::can_single_copy() const {
  for (std::size_t peer = 0; peer < processes_.size(); ++peer) {
    if (!processes_[peer]) continue;
    const Status status = processes_[peer]->can_read_memory();
    if (!status.ok()) return Status::error("process_vm_readv of " + names_[peer] + ": " + status.message());
  }
  return Status();
}

// The peer writes the word, so it may hold any value.
int PeerSet::awaited_by(int r) const {
  const int awaited = peer(r).header->waiting_for.load(std::memory_order_relaxed);
  return awaited < ranks ? std::max(awaited, -1) : -1;
}

std::vector<PeerSnapshot> PeerSet::snapshots() const {
  std::vector<PeerSnapshot> snapshots;
  for (int r = 0; r < static_cast<int>(peers.size()); ++r) {
    const RegionHeader& header = *peer(r).header;
    PeerSnapshot snapshot;
    // The peer goes on while this thread reads: `text` may be that of a later operation, which reports tolerate.
    for (const OpHeader& op : header.ops) {
      const std::uint64_t number = op.number.load(std::memory_order_acquire);
      if (number <= snapshot.last_operation) continue;
      snapshot.last_operation = number;
      snapshot.text.assign(op.text, strnlen(op.text, kOpText));
    }
    snapshot.pieces_done = header.pieces_done.load(std::memory_order_relaxed);
    snapshot.waiting_for = awaited_by(r);
    snapshot.alive = !has_ended(r);
    snapshot.closed = header.closed.load(std::memory_order_relaxed) != 0;
    snapshots.push_back(std::move(snapshot));
  }
  return snapshots;
}

std::uint64_t PeerSet::announce_operation(const Call& call, std::uint64_t number) {
  const std::uint64_t fingerprint = announce(*own_.header, call, number);
  last_announced_ = number;
  return fingerprint;
}

bool PeerSet::has_ended(int peer, int wait_ms) const {
  if (const RemotePeer* const remote = remote_peer(peer)) return remote->has_ended();
  const auto& process = processes_[static_cast<std::size_t>(peer)];
  return process && process->has_ended(wait_ms);
}

// The links forget here when they deliver next. They learn it again from what the interpreter asks for (max_sleep_ns).
void PeerSet::receive() {
  remote_.receive();
  if (inside_) inside_->begin_round();
  if (between_) between_->begin_round();
}

// A thread that closes calls it, when no driver is left. Peers in shared memory read `closed`, others get a frame.
void PeerSet::start_goodbye(bool failed) {
  own_.header->closed.store(1, std::memory_order_release);
  wake_peers();
  remote_.start_goodbye(failed);
}

std::uint64_t PeerSet::max_sleep_ns(std::uint64_t limit) const {
  if (inside_) limit = inside_->max_sleep_ns(limit);
  if (between_) limit = between_->max_sleep_ns(limit);
  return limit;
}

// One thread cannot wait for a futex and for sockets at once. A rank with remote peers sleeps on the sockets, for a
// short time if it also has peers in shared memory.
void PeerSet::sleep(WakeupFutex& futex, std::uint32_t seen, std::uint64_t timeout_ns) {
  if (remote_.empty()) {
    futex.wait(seen, timeout_ns);
    return;
  }
  remote_.flush();  // lets the descriptor report also when more can be sent
  if (!remote_.arm()) return;
  pollfd arrival{remote_.epoll_fd(), POLLIN, 0};
  sleep_until_readable(&arrival, 1, mixed_ ? std::min(timeout_ns, kMixedSleepNs) : timeout_ns);
}

void PeerSet::publish_flag(std::size_t index, std::uint64_t seq, std::uint64_t operation, std::uint32_t checksum) {
  BoxFlag& flag = own_.flags[index];
  flag.operation.store(operation, std::memory_order_relaxed);
  flag.checksum.store(checksum, std::memory_order_relaxed);
  flag.seq.store(seq, std::memory_order_release);  // last: a peer that reads it may read the rest and the payload
  wake_peers();
}

void PeerSet::publish_pieces_done(std::uint64_t pieces) {
  own_.header->pieces_done.store(pieces, std::memory_order_release);
  wake_peers();
  remote_.send_pieces_done(pieces);
}

// UCX, or a part that is sent once more, may still read a slot whose piece all ranks have finished.
int PeerSet::peer_being_sent(std::uint64_t seq) {
  const std::uint8_t* const slot = own_.slot(seq);
  return remote_.awaited_by_sends(slot, slot + layout_.slot_bytes);
}

void PeerSet::wake_peers() {
  // Between the store that a peer waits for and the load of its `sleepers`; ScopedSleeper has the other fence. Without
  // the two, a peer could go to sleep just as this rank finds no sleeper.
  full_fence();
  for (const auto& process : processes_) {
    if (process) process->page().wakeup.notify();
  }
}

std::uint8_t* PeerSet::map_tensor(int peer, const SharedTensorLocation& location, std::size_t bytes) {
  try {
    return processes_[static_cast<std::size_t>(peer)]->map_tensor(location, bytes);
  } catch (const std::exception& error) {
    // The descriptors of a process that is exiting go away before the process itself.
    if (has_ended(peer, kExitingMs)) throw_peer_lost(peer);
    throw Error(ErrorKind::internal, name(rank) + " could not map a tensor of " + name(peer) + ": " + error.what(),
                peer);
  }
}

void PeerSet::read_memory(int peer, std::uint64_t address, std::uint8_t* out, std::size_t bytes) {
  const std::error_code error = processes_[static_cast<std::size_t>(peer)]->read_memory(address, out, bytes);
  if (!error) {
    single_copy_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    return;
  }
  // The memory of a process that is exiting goes away before the process itself.
  if (error.value() == ESRCH || has_ended(peer, kExitingMs)) throw_peer_lost(peer);
  throw Error(ErrorKind::internal,
              name(rank) + " could not read a tensor of " + name(peer) + ": " + error.message() +
                  "; DTCOMM_SINGLE_COPY=off sends copies instead",
              peer);
}

// A process that is alive after its memory was read is the one that was read: its pid was not free for another.
void PeerSet::require_alive(int peer) {
  if (has_ended(peer)) throw_peer_lost(peer);
}

void PeerSet::throw_peer_lost(int peer) const {
  throw Error(ErrorKind::peer_lost, name(peer) + " is gone: its process ended while " + name(rank) + " read its tensor",
              peer);
}

}  // namespace dtcomm
