// What a process shares with its peers in all communicators: a futex by which they wake it, and the table of its
// tensors that lie in shared memory (dtcomm.empty).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <vector>

#include "core/status.h"
#include "engine/memfd.h"
#include "engine/platform.h"
#include "engine/process_handle.h"

namespace dtcomm {

constexpr int kMaxSharedTensors = 4096;

// A futex that wakes all sleeping threads of a process. Notifying costs one load while no thread sleeps, because peers
// notify after every flag that they publish.
struct WakeupFutex {
  std::atomic<std::uint32_t> counter{0};
  std::atomic<std::uint32_t> sleepers{0};

  // Call this after the store that the sleeper waits for and a seq_cst fence. A sleeper announces itself in `sleepers`
  // before it reads the flag for the last time, so at least one of the two sees the other.
  void notify();
  // Sleeps until notified or until `timeout_ns` has passed. `seen` is the `counter` that the caller read after it had
  // announced itself in `sleepers`.
  void wait(std::uint32_t seen, std::uint64_t timeout_ns);
};

// Announces the current thread as a sleeper for the lifetime of the object.
class ScopedSleeper {
 public:
  explicit ScopedSleeper(WakeupFutex& futex) : futex_(futex) {
    futex_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    full_fence();  // the caller's next loads must not be executed before
  }
  ~ScopedSleeper() { futex_.sleepers.fetch_sub(1, std::memory_order_release); }
  ScopedSleeper(const ScopedSleeper&) = delete;

 private:
  WakeupFutex& futex_;
};

struct SharedTensorEntry {
  std::atomic<std::uint64_t> id{0};  // 0: the slot is free; stored last
  std::atomic<std::int32_t> fd{-1};
  std::atomic<std::uint64_t> bytes{0};
};

struct ProcessPage {
  std::uint64_t token = 0;
  alignas(64) WakeupFutex wakeup;
  alignas(64) std::atomic<std::uint64_t> freed{0};  // counts freed tensors: peers then drop their mappings
  SharedTensorEntry tensors[kMaxSharedTensors];
};

// Shared memory for one tensor; freed with the object. Forked children inherit it, as they do other tensors.
class SharedTensorMemory {
 public:
  explicit SharedTensorMemory(std::size_t bytes);
  ~SharedTensorMemory();
  SharedTensorMemory(const SharedTensorMemory&) = delete;
  void* data() const { return static_cast<std::uint8_t*>(mapping_.data()) + skew_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::size_t skew_;
  MemfdMapping mapping_;
  int slot_ = -1;
  std::uint64_t id_ = 0;
};

// Where a tensor lies among the shared tensors of its process; `slot` is -1 if it does not lie in shared memory.
struct SharedTensorLocation {
  std::int64_t slot = -1;
  std::uint64_t id = 0;
  std::uint64_t offset = 0;  // bytes
};

// This process as its peers see it.
class LocalProcess {
 public:
  static LocalProcess& instance() { return per_process<LocalProcess>(); }
  LocalProcess();

  ProcessPage& page() { return *page_; }
  int fd() const { return mapping_.fd(); }
  SharedTensorLocation find(const void* data, std::size_t bytes);

 private:
  friend class SharedTensorMemory;

  MemfdMapping mapping_;
  ProcessPage* page_;
  std::mutex mutex_;
  std::atomic<int> count_{0};
  struct Entry {
    const std::uint8_t* begin;
    std::size_t bytes;
    int slot;
    std::uint64_t id;
    std::size_t skew;
  };
  std::vector<Entry> entries_;
  std::uint64_t next_id_ = 1;
};

// A peer process: its handle, its page, and mappings of those of its shared tensors that were used.
class PeerProcess {
 public:
  // `page_address` is the address of the page in the peer itself. Throws std::system_error if there is no such
  // process or the page cannot be mapped, and std::runtime_error if it belongs to another process.
  PeerProcess(int pid, int page_fd, std::uint64_t token, std::uint64_t page_address);

  ProcessPage& page() const { return *static_cast<ProcessPage*>(mapping_.data()); }
  bool has_ended(int wait_ms) const { return handle_->has_ended(wait_ms); }
  // The address, in this process, of bytes of a shared tensor of the peer; maps the tensor on first use.
  std::uint8_t* map_tensor(const SharedTensorLocation& location, std::size_t bytes);
  // Copies from the peer's private memory (process_vm_readv).
  std::error_code read_memory(std::uint64_t address, void* out, std::size_t bytes) const;
  // Whether this process may read the peer's private memory.
  Status can_read_memory() const;

 private:
  struct MappedTensor {
    std::uint64_t id;
    std::int64_t slot;
    MemfdMapping mapping;
  };
  int pid_;
  // Opened before the page is read: its token then proves that this is the process that was meant, not a later one with
  // its pid.
  std::shared_ptr<const ProcessHandle> handle_;
  std::uint64_t page_address_;
  MemfdMapping mapping_;
  std::uint64_t freed_ = 0;
  std::vector<MappedTensor> tensors_;
};

// The monotonic clock.
std::uint64_t now_ns();

}  // namespace dtcomm
