// Test buffers next to inaccessible pages. Reading or writing past the guarded end faults at the instruction that does
// it, with and without sanitizers; writes past the other end are detected later by a canary.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace dtcomm::tests {

class GuardedBuffer {
 public:
  explicit GuardedBuffer(std::size_t capacity) {
    page_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    mapped_bytes_ = (capacity + kMargin + page_ - 1) / page_ * page_;
    void* mapped = mmap(nullptr, mapped_bytes_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    first_ = static_cast<std::uint8_t*>(mapped) + page_;
    if (mprotect(first_, mapped_bytes_, PROT_READ | PROT_WRITE) != 0) std::abort();
  }
  ~GuardedBuffer() { munmap(first_ - page_, mapped_bytes_ + 2 * page_); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  // Returns `size` bytes that end at the upper guard page or begin at the lower one. Their content is unspecified.
  std::uint8_t* place(std::size_t size, bool at_end) {
    if (size + kMargin > mapped_bytes_) std::abort();
    std::uint8_t* data = at_end ? first_ + mapped_bytes_ - size : first_;
    margin_ = at_end ? data - kMargin : data + size;
    std::memset(margin_, kCanary, kMargin);
    return data;
  }

  // Whether nothing was written beside the last placed bytes.
  bool intact() const {
    for (std::size_t i = 0; i < kMargin; ++i) {
      if (margin_[i] != kCanary) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kMargin = 256;
  static constexpr std::uint8_t kCanary = 0xa5;
  std::uint8_t* first_ = nullptr;
  std::uint8_t* margin_ = nullptr;
  std::size_t page_ = 0, mapped_bytes_ = 0;
};

}  // namespace dtcomm::tests
