// Memory for one buffer of a test that ends, or begins, where no byte may be touched: reading or writing past that end
// is a fault at the instruction that does it, with and without sanitizers; writes past the other end are found later.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace dtcomm::tests {

class Guarded {
 public:
  explicit Guarded(std::size_t capacity) {
    page_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    room_ = (capacity + kMargin + page_ - 1) / page_ * page_;
    void* mapped = mmap(nullptr, room_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    first_ = static_cast<std::uint8_t*>(mapped) + page_;
    if (mprotect(first_, room_, PROT_READ | PROT_WRITE) != 0) std::abort();
  }
  ~Guarded() { munmap(first_ - page_, room_ + 2 * page_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  // `size` bytes against the upper guard page, or against the lower one; their content is what it was before.
  std::uint8_t* place(std::size_t size, bool at_end) {
    if (size + kMargin > room_) std::abort();
    std::uint8_t* data = at_end ? first_ + room_ - size : first_;
    margin_ = at_end ? data - kMargin : data + size;
    std::memset(margin_, kCanary, kMargin);
    return data;
  }

  // Was nothing written beside the last placed bytes?
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
  std::size_t page_ = 0, room_ = 0;
};

}  // namespace dtcomm::tests
