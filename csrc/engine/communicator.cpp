#include "engine/communicator.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/cpu_relax.h"
#include "engine/progress_thread.h"

namespace dtcomm {
namespace {

constexpr int kEndingMs = 100;

}  // namespace

Communicator::Communicator(const CommunicatorOptions& options)
    : options_(options), token_(random_token()), owner_(getpid()), timeout_ns_(options.timeout_ns) {
  rank = options.rank;
  ranks = options.ranks;
  layout_ = {static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(ranks), options.max_boxes, options.slot_bytes,
             options.inside.on() || options.between.on()};
  area_ = Mapping::create("dtcomm-area", layout_.bytes());
  own_ = view_of(area_.data(), layout_);
  new (own_.head) AreaHead;
  for (std::size_t i = 0; i < std::size_t{options.max_boxes} * kSlots; ++i) new (own_.flags + i) Flag;
  for (std::size_t i = 0; i < layout_.stamps(); ++i) new (own_.stamps + i) Stamp;
  const std::size_t flags = std::size_t{options.max_boxes} * kSlots;
  if (options.inside.on()) inside_ = std::make_unique<Link>(options.inside, Nic::instance(0), ranks, flags);
  if (options.between.on()) between_ = std::make_unique<Link>(options.between, Nic::instance(1), ranks, flags);
  own_.head->magic = kAreaMagic;
  own_.head->bytes = layout_.bytes();
  own_.head->rank = static_cast<std::uint32_t>(rank);
  own_.head->ranks = static_cast<std::uint32_t>(ranks);
  own_.head->max_boxes = options.max_boxes;
  own_.head->pid = static_cast<std::int32_t>(getpid());
  own_.head->token = token_;
}

Communicator::~Communicator() { close(); }

PeerAddress Communicator::address() const {
  Process& process = Process::instance();
  const auto page = reinterpret_cast<std::uintptr_t>(&process.page());
  return {static_cast<int>(getpid()), process.fd(), process.page().token, page, area_.fd(), token_, -1, false, ""};
}

void Communicator::attach(const std::vector<PeerAddress>& addresses) {
  if (addresses.size() != static_cast<std::size_t>(ranks)) throw std::invalid_argument("attach: one address per rank");
  for (int peer = 0; peer < ranks; ++peer) {  // first of all: they own their sockets
    const PeerAddress& address = addresses[static_cast<std::size_t>(peer)];
    if (address.socket < 0) continue;
    AreaLayout layout = layout_;
    layout.rank = static_cast<std::uint32_t>(peer);
    remotes_.resize(addresses.size());
    remotes_[static_cast<std::size_t>(peer)] = std::make_unique<Remote>(address.socket, layout, rank);
    wire_.add(address.socket, peer);
  }
  links.assign(layout_.link ? addresses.size() : 0, nullptr);
  wired = !remotes_.empty();
  // What comes over a socket wakes its sleeper at once; who yields on a busy core is away for a whole time slice.
  if (wired) options_.yield_ns = 0;
  for (int peer = 0; peer < ranks; ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    const PeerAddress& address = addresses[index];
    names_.push_back(address.name);
    peer_areas_.emplace_back();
    processes_.emplace_back();
    pidfds_.push_back(-1);
    if (peer == rank) {
      peers.push_back(own_);
      continue;
    }
    if (layout_.link) {
      links[index] = address.between ? between_.get() : inside_.get();
      wired |= links[index] != nullptr;
      if (links[index] && address.socket >= 0) links[index]->spare(peer);
    }
    if (address.socket >= 0) {
      peers.push_back(remotes_[index]->view());
      continue;
    }
    mixed_ = !remotes_.empty();
    AreaLayout layout = layout_;
    layout.rank = static_cast<std::uint32_t>(peer);
    // Open the process first: the tokens then tell that it is the one we mean, and not a later one with its pid.
    const auto pidfd = static_cast<int>(syscall(SYS_pidfd_open, address.pid, 0));
    if (pidfd < 0) throw std::system_error(errno, std::generic_category(), "pidfd_open of " + address.name);
    pidfds_.back() = pidfd;
    peer_areas_.back() = Mapping::attach(address.pid, address.area_fd, layout.bytes());
    const PeerView view = view_of(peer_areas_.back().data(), layout);
    if (view.head->magic != kAreaMagic || view.head->token != address.area_token ||
        view.head->rank != static_cast<std::uint32_t>(peer) || view.head->bytes != layout.bytes()) {
      throw std::runtime_error("shared memory of " + address.name + " is not what it announced");
    }
    processes_.back() = std::make_unique<Peer>(address.pid, address.page_fd, address.page_token, address.page);
    peers.push_back(view);
  }
  probes = options_.probes && remotes_.empty();
  ProgressThread::instance().add(this);
}

std::string Communicator::who(int peer) const {
  const auto index = static_cast<std::size_t>(peer);
  return index < names_.size() ? names_[index] : "rank " + std::to_string(peer);
}

void Communicator::ring_peers() {
  full_fence();
  for (const auto& process : processes_) {
    if (process) process->page().bell.ring();
  }
}

const Remote* Communicator::remote_of(int peer) const {
  return remotes_.empty() ? nullptr : remotes_[static_cast<std::size_t>(peer)].get();
}

void Communicator::look() {
  pump();
  if (inside_) inside_->look();
  if (between_) between_->look();
}

std::uint64_t Communicator::nap(std::uint64_t most) const {
  if (inside_) most = inside_->nap(most);
  if (between_) most = between_->nap(most);
  return most;
}

void Communicator::publish_flag(std::size_t index, std::uint64_t seq, std::uint64_t operation, std::uint32_t checksum) {
  Flag& flag = own_.flags[index];
  flag.operation.store(operation, std::memory_order_relaxed);
  flag.checksum.store(checksum, std::memory_order_relaxed);
  flag.seq.store(seq, std::memory_order_release);
  ring_peers();
}

void Communicator::publish_done(std::uint64_t pieces) {
  own_.head->done.store(pieces, std::memory_order_release);
  ring_peers();
  if (remotes_.empty()) return;
  const std::lock_guard<std::mutex> lock(remotes_mutex_);
  for (const auto& remote : remotes_) {
    if (remote) remote->send_done(pieces);
  }
}

std::uint8_t* Communicator::resolve(int peer, std::int64_t region, std::uint64_t id, std::uint64_t offset,
                                    std::size_t bytes) {
  return processes_[static_cast<std::size_t>(peer)]->resolve(region, id, offset, bytes);
}

void Communicator::pull(int peer, std::uint64_t address, std::uint8_t* out, std::size_t bytes) {
  const int error = processes_[static_cast<std::size_t>(peer)]->pull(address, out, bytes);
  if (error == 0) {
    pulled_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    return;
  }
  culprit_ = peer;
  // The memory of a process that is ending goes before the process itself.
  if (error == ESRCH || dead(peer, kEndingMs)) raise_gone(peer);
  throw Error(ErrorKind::internal, who(rank) + " could not read a tensor of " + who(peer) + ": " +
                                       std::generic_category().message(error) +
                                       "; DTCOMM_SINGLE_COPY=off sends copies instead");
}

// A process that is alive after its memory was read is the one that was read: its number was not free for another.
void Communicator::confirm(int peer) {
  if (!dead(peer)) return;
  culprit_ = peer;
  raise_gone(peer);
}

std::string Communicator::why_no_pulls() const {
  for (std::size_t peer = 0; peer < processes_.size(); ++peer) {
    if (!processes_[peer]) continue;
    const std::string why = processes_[peer]->why_no_pulls();
    if (!why.empty()) return "process_vm_readv of " + names_[peer] + ": " + why;
  }
  return "";
}

void Communicator::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  if (owner_ == static_cast<int>(getpid())) {
    ProgressThread::instance().remove(this);
    evict_driver();
    fail_queue(std::make_exception_ptr(std::logic_error("the communicator was destroyed before this operation ended")));
    own_.head->closed.store(1, std::memory_order_release);
    ring_peers();
    take_leave();
  }
  for (const int pidfd : pidfds_) {
    if (pidfd >= 0) ::close(pidfd);
  }
  pidfds_.clear();
  peers.clear();
  peer_areas_.clear();
  processes_.clear();
  remotes_.clear();
  wire_.close();
  area_.reset();
}

}  // namespace dtcomm
