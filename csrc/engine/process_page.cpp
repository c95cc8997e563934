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
#include <utility>

#include "engine/shm_layout.h"

namespace dtcomm {
namespace {

// Ranks work at the same index of each other's tensors at the same time. Tensors that start at different offsets keep
// them out of each other's cache sets and memory banks.
constexpr std::size_t kMinSkewedBytes = 1024 * 1024;
constexpr std::size_t kSkews = 16;
constexpr std::size_t kSkew = 17 * kPage + 64;

}  // namespace

std::uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000000000ull + static_cast<std::uint64_t>(now.tv_nsec);
}

void WakeupFutex::notify() {
  if (sleepers.load(std::memory_order_relaxed) == 0) return;
  counter.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void WakeupFutex::wait(std::uint32_t seen, std::uint64_t timeout_ns) {
  timespec timeout{static_cast<time_t>(timeout_ns / 1000000000ull), static_cast<long>(timeout_ns % 1000000000ull)};
  syscall(SYS_futex, &counter, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

LocalProcess::LocalProcess() : mapping_(MemfdMapping::create("dtcomm-process", round_up(sizeof(ProcessPage), kPage))) {
  page_ = new (mapping_.data()) ProcessPage;
  page_->token = random_token();
}

SharedTensorLocation LocalProcess::find(const void* data, std::size_t bytes) {
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

SharedTensorMemory::SharedTensorMemory(std::size_t bytes)
    : bytes_(bytes),
      skew_(bytes < kMinSkewedBytes ? 0 : static_cast<std::size_t>(getpid()) % kSkews * kSkew),
      mapping_(MemfdMapping::create("dtcomm-tensor", round_up(std::max<std::size_t>(bytes, 1) + skew_, kPage),
                                    ForkedChildren::inherit)) {
  LocalProcess& process = LocalProcess::instance();
  const std::lock_guard<std::mutex> lock(process.mutex_);
  for (int slot = 0; slot < kMaxSharedTensors; ++slot) {
    SharedTensorEntry& entry = process.page_->tensors[slot];
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
  throw std::runtime_error("dtcomm.empty: this process already holds " + std::to_string(kMaxSharedTensors) +
                           " tensors in shared memory; free some or allocate fewer, larger ones");
}

SharedTensorMemory::~SharedTensorMemory() {
  if (mapping_.in_forked_child()) return;  // the table of this process has no entry for it
  LocalProcess& process = LocalProcess::instance();
  const std::lock_guard<std::mutex> lock(process.mutex_);
  const auto found =
      std::find_if(process.entries_.begin(), process.entries_.end(),
                   [&](const LocalProcess::Entry& entry) { return entry.id == id_ && entry.slot == slot_; });
  if (found == process.entries_.end()) return;
  process.entries_.erase(found);
  process.count_.fetch_sub(1, std::memory_order_relaxed);
  process.page_->tensors[slot_].id.store(0, std::memory_order_release);
  process.page_->freed.fetch_add(1, std::memory_order_release);
}

PeerProcess::PeerProcess(int pid, int page_fd, std::uint64_t token, std::uint64_t page_address)
    : pid_(pid),
      handle_(ProcessHandle::open(pid, token)),
      page_address_(page_address),
      mapping_(MemfdMapping::attach(pid, page_fd, round_up(sizeof(ProcessPage), kPage))) {
  if (page().token != token) {
    throw std::runtime_error("process " + std::to_string(pid) + " is not the peer it claims to be");
  }
}

std::error_code PeerProcess::read_memory(std::uint64_t address, void* out, std::size_t bytes) const {
  auto* to = static_cast<std::uint8_t*>(out);
  while (bytes > 0) {
    const iovec local{to, bytes};
    const iovec remote{reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), bytes};
    const ssize_t got = process_vm_readv(pid_, &local, 1, &remote, 1, 0);
    if (got < 0) return {errno, std::generic_category()};
    if (got == 0) return {EFAULT, std::generic_category()};
    to += got;
    address += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return {};
}

Status PeerProcess::can_read_memory() const {
  std::uint64_t token = 0;
  const std::error_code error = read_memory(page_address_ + offsetof(ProcessPage, token), &token, sizeof token);
  if (error.value() == EPERM) {
    return Status::error(error.message() + " (kernel.yama.ptrace_scope, or the container's capabilities)");
  }
  if (error) return Status::error(error.message());
  return token == page().token ? Status() : Status::error("its memory does not hold the page that it announced");
}

std::uint8_t* PeerProcess::map_tensor(const SharedTensorLocation& location, std::size_t bytes) {
  const std::uint64_t freed = page().freed.load(std::memory_order_acquire);
  if (freed != freed_) {
    const auto is_freed = [&](const MappedTensor& tensor) {
      return page().tensors[tensor.slot].id.load(std::memory_order_acquire) != tensor.id;
    };
    tensors_.erase(std::remove_if(tensors_.begin(), tensors_.end(), is_freed), tensors_.end());
    freed_ = freed;
  }
  auto tensor = std::find_if(tensors_.begin(), tensors_.end(),
                             [&](const MappedTensor& mapped) { return mapped.id == location.id; });
  if (tensor == tensors_.end()) {
    if (location.slot < 0 || location.slot >= kMaxSharedTensors) {
      throw std::runtime_error("the slot of a peer's shared tensor is out of range");
    }
    const SharedTensorEntry& entry = page().tensors[location.slot];
    // Behind the descriptor of a tensor that was freed there may be another file, also between two looks at the entry.
    const auto require_same = [&] {
      if (location.id == 0 || entry.id.load(std::memory_order_acquire) != location.id) {
        throw std::runtime_error("a peer's shared tensor was freed before it could be mapped");
      }
    };
    require_same();
    const std::size_t size = entry.bytes.load(std::memory_order_relaxed);
    MemfdMapping mapping = MemfdMapping::attach(pid_, entry.fd.load(std::memory_order_relaxed), size);
    require_same();
    tensors_.push_back({location.id, location.slot, std::move(mapping)});
    tensor = tensors_.end() - 1;
  }
  const std::size_t size = tensor->mapping.size();
  if (location.offset > size || bytes > size - location.offset) {
    throw std::runtime_error("a peer's tensor lies outside its shared memory");
  }
  return static_cast<std::uint8_t*>(tensor->mapping.data()) + location.offset;
}

}  // namespace dtcomm
