#include "engine/process_page.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "engine/shm_layout.h"

namespace dtcomm {
namespace {

// Ranks work at the same index of each other's tensors at once: starts that differ keep them out of each other's
// cache sets and memory banks.
constexpr std::size_t kSkewFrom = 1024 * 1024;
constexpr std::size_t kSkews = 16;
constexpr std::size_t kSkew = 17 * kPage + 64;

}  // namespace

std::uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000000000ull + static_cast<std::uint64_t>(now.tv_nsec);
}

void Bell::ring() {
  if (sleepers.load(std::memory_order_relaxed) == 0) return;
  word.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep(std::uint32_t seen, std::uint64_t timeout_ns) {
  timespec timeout{static_cast<time_t>(timeout_ns / 1000000000ull), static_cast<long>(timeout_ns % 1000000000ull)};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

Process::Process() : mapping_(Mapping::create("dtcomm-process", AreaLayout::round_up(sizeof(ProcessPage), kPage))) {
  page_ = new (mapping_.data()) ProcessPage;
  page_->pid = static_cast<std::int32_t>(getpid());
  page_->token = random_token();
}

Process& Process::instance() {
  static std::mutex mutex;
  static std::atomic<Process*> current{nullptr};
  static std::atomic<int> owner{0};
  const int pid = static_cast<int>(getpid());
  if (owner.load(std::memory_order_acquire) == pid) return *current.load(std::memory_order_acquire);
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner.load() != pid) {
    current = new Process;  // a parent's page is not mapped in its children, and never freed: peers may hold it
    owner.store(pid, std::memory_order_release);
  }
  return *current.load();
}

RegionPlace Process::find(const void* data, std::size_t bytes) {
  if (count_.load(std::memory_order_relaxed) == 0) return {};
  const auto* begin = static_cast<const std::uint8_t*>(data);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Entry& entry : entries_) {
    if (begin >= entry.begin && begin + bytes <= entry.begin + entry.bytes) {
      return {entry.slot, entry.id, entry.skew + static_cast<std::uint64_t>(begin - entry.begin)};
    }
  }
  return {};
}

Region::Region(std::size_t bytes)
    : bytes_(bytes),
      skew_(bytes < kSkewFrom ? 0 : static_cast<std::size_t>(getpid()) % kSkews * kSkew),
      mapping_(Mapping::create("dtcomm-tensor", AreaLayout::round_up(std::max<std::size_t>(bytes, 1) + skew_, kPage))) {
  Process& process = Process::instance();
  const std::lock_guard<std::mutex> lock(process.mutex_);
  for (int slot = 0; slot < kRegions; ++slot) {
    RegionEntry& entry = process.page_->regions[slot];
    if (entry.id.load(std::memory_order_relaxed) != 0) continue;
    slot_ = slot;
    id_ = process.next_id_++;
    entry.fd.store(mapping_.fd(), std::memory_order_relaxed);
    entry.bytes.store(mapping_.size(), std::memory_order_relaxed);
    entry.id.store(id_, std::memory_order_release);
    process.entries_.push_back({static_cast<const std::uint8_t*>(data()), bytes, slot, id_, skew_});
    process.count_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  throw std::runtime_error("dtcomm.empty: this process already holds " + std::to_string(kRegions) +
                           " tensors in shared memory; free some or allocate fewer, larger ones");
}

Region::~Region() {
  Process& process = Process::instance();
  const std::lock_guard<std::mutex> lock(process.mutex_);
  const auto found = std::find_if(process.entries_.begin(), process.entries_.end(),
                                  [&](const Process::Entry& entry) { return entry.id == id_ && entry.slot == slot_; });
  if (found == process.entries_.end()) return;  // a forked child's copy
  process.entries_.erase(found);
  process.count_.fetch_sub(1, std::memory_order_relaxed);
  process.page_->regions[slot_].id.store(0, std::memory_order_release);
  process.page_->retired.fetch_add(1, std::memory_order_release);
}

Peer::Peer(int pid, int page_fd, std::uint64_t token, std::uint64_t page_at)
    : pid_(pid),
      at_(page_at),
      mapping_(Mapping::attach(pid, page_fd, AreaLayout::round_up(sizeof(ProcessPage), kPage))) {
  if (page().token != token)
    throw std::runtime_error("process " + std::to_string(pid) + " is not the peer it claims to be");
}

int Peer::pull(std::uint64_t address, void* out, std::size_t bytes) const {
  auto* to = static_cast<std::uint8_t*>(out);
  while (bytes > 0) {
    const iovec here{to, bytes};
    const iovec there{reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), bytes};
    const ssize_t got = process_vm_readv(pid_, &here, 1, &there, 1, 0);
    if (got < 0) return errno;
    if (got == 0) return EFAULT;
    to += got;
    address += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return 0;
}

std::string Peer::why_no_pulls() const {
  std::uint64_t token = 0;
  if (const int error = pull(at_ + offsetof(ProcessPage, token), &token, sizeof token); error != 0) {
    const std::string what = std::generic_category().message(error);
    return error == EPERM ? what + " (kernel.yama.ptrace_scope, or the container's capabilities)" : what;
  }
  return token == page().token ? "" : "its memory is not what its page says";
}

std::uint8_t* Peer::resolve(std::int64_t slot, std::uint64_t id, std::uint64_t offset, std::size_t bytes) {
  const std::uint64_t retired = page().retired.load(std::memory_order_acquire);
  if (retired != retired_) {
    regions_.erase(std::remove_if(regions_.begin(), regions_.end(),
                                  [&](const Mapped& mapped) {
                                    return page().regions[mapped.slot].id.load(std::memory_order_acquire) != mapped.id;
                                  }),
                   regions_.end());
    retired_ = retired;
  }
  auto found = std::find_if(regions_.begin(), regions_.end(), [&](const Mapped& mapped) { return mapped.id == id; });
  if (found == regions_.end()) {
    if (slot < 0 || slot >= kRegions) throw std::runtime_error("peer's region is out of range");
    const RegionEntry& entry = page().regions[slot];
    const std::size_t size = entry.bytes.load(std::memory_order_relaxed);
    regions_.push_back({id, slot, Mapping::attach(pid_, entry.fd.load(std::memory_order_relaxed), size)});
    found = regions_.end() - 1;
  }
  if (offset > found->mapping.size() || bytes > found->mapping.size() - offset) {
    throw std::runtime_error("peer's tensor lies outside its region");
  }
  return static_cast<std::uint8_t*>(found->mapping.data()) + offset;
}

}  // namespace dtcomm
