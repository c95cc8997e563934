// What a process shows to its peers whatever the communicator: a bell to wake it by, and the table of its tensors
// that lie in shared memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/memfd.h"

namespace dtcomm {

constexpr int kRegions = 4096;

// Ringing is a load while nobody sleeps: publishers do it after every flag.
struct Bell {
  std::atomic<std::uint32_t> word{0};
  std::atomic<std::uint32_t> sleepers{0};

  // Call after the store that the sleeper waits for and a seq_cst fence: a sleeper announces itself before its last
  // look at the flag, so one of the two sees the other.
  void ring();
  // Sleeps until rung or `timeout_ns` passed; `seen` is `word` read after announcing oneself in `sleepers`.
  void sleep(std::uint32_t seen, std::uint64_t timeout_ns);
};

struct RegionEntry {
  std::atomic<std::uint64_t> id{0};  // 0: free; stored last
  std::atomic<std::int32_t> fd{-1};
  std::atomic<std::uint64_t> bytes{0};
};

struct ProcessPage {
  std::uint64_t token = 0;
  std::int32_t pid = 0;
  alignas(64) Bell bell;
  alignas(64) std::atomic<std::uint64_t> retired{0};  // counts freed regions: peers then drop their mappings
  RegionEntry regions[kRegions];
};

// Memory for one tensor; freed with the object.
class Region {
 public:
  explicit Region(std::size_t bytes);
  ~Region();
  Region(const Region&) = delete;
  void* data() const { return static_cast<std::uint8_t*>(mapping_.data()) + skew_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::size_t skew_;
  Mapping mapping_;
  int slot_ = -1;
  std::uint64_t id_ = 0;
};

struct RegionPlace {
  std::int64_t slot = -1;
  std::uint64_t id = 0;
  std::uint64_t offset = 0;
};

class Process {
 public:
  // This process's; a forked child gets its own.
  static Process& instance();

  ProcessPage& page() { return *page_; }
  int fd() const { return mapping_.fd(); }
  // Where `data` lies among the regions; slot -1 where it lies in none.
  RegionPlace find(const void* data, std::size_t bytes);

 private:
  friend class Region;
  Process();

  Mapping mapping_;
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

// A peer process: its page, and those of its regions that were used.
class Peer {
 public:
  // `page` is where the peer itself has its page.
  Peer(int pid, int page_fd, std::uint64_t token, std::uint64_t page);

  ProcessPage& page() const { return *static_cast<ProcessPage*>(mapping_.data()); }
  std::uint8_t* resolve(std::int64_t slot, std::uint64_t id, std::uint64_t offset, std::size_t bytes);
  // Copies from the peer's own memory: 0, or errno.
  int pull(std::uint64_t address, void* out, std::size_t bytes) const;
  // What keeps this process from reading the peer's memory; empty where nothing does.
  std::string why_no_pulls() const;

 private:
  struct Mapped {
    std::uint64_t id;
    std::int64_t slot;
    Mapping mapping;
  };
  int pid_;
  std::uint64_t at_;  // the page, in the peer
  Mapping mapping_;
  std::uint64_t retired_ = 0;
  std::vector<Mapped> regions_;
};

std::uint64_t now_ns();

}  // namespace dtcomm
