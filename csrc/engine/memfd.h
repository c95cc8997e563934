// Anonymous shared memory (memfd_create, or /dev/shm where that is refused), which peers map through
// /proc/<pid>/fd/<n>. It has no name, so nothing is left behind however a process ends, and the size limit of /dev/shm
// does not apply.
#pragma once

#include <cstddef>
#include <string>

namespace dtcomm {

// Whether forked children see the memory. Through inherited memory a child reads and writes what its parent does.
enum class ForkedChildren { excluded, inherit };

class MemfdMapping {
 public:
  MemfdMapping() = default;
  MemfdMapping(MemfdMapping&& other) noexcept { *this = static_cast<MemfdMapping&&>(other); }
  MemfdMapping& operator=(MemfdMapping&& other) noexcept;
  ~MemfdMapping() { reset(); }

  // Creates and maps `bytes` of zeroed memory. All pages are reserved at once, so a machine without enough memory
  // throws std::system_error here instead of raising SIGBUS later.
  static MemfdMapping create(const char* name, std::size_t bytes, ForkedChildren children = ForkedChildren::excluded);
  // Maps the memory that process `pid` created as its descriptor `fd`. Throws std::system_error if it cannot be opened
  // or is shorter than `bytes`.
  static MemfdMapping attach(int pid, int fd, std::size_t bytes);

  void* data() const { return data_; }
  std::size_t size() const { return size_; }
  int fd() const { return fd_; }  // -1 if attached
  bool in_forked_child() const;   // of the process that made the mapping
  void reset();

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
  int fd_ = -1;
  int owner_pid_ = -1;
  ForkedChildren children_ = ForkedChildren::excluded;
};

// A random non-zero number with which a process proves that it is the one that was meant.
unsigned long long random_token();

}  // namespace dtcomm
