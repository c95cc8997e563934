// Anonymous shared memory that peers open through /proc/<pid>/fd/<n>: it has no name, so nothing is left behind
// however a process ends, and no limit of /dev/shm applies.
#pragma once

#include <cstddef>
#include <string>

namespace dtcomm {

class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { *this = static_cast<Mapping&&>(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping() { reset(); }

  // Pages are reserved at once: a full machine is an error here and not a SIGBUS later. std::system_error.
  static Mapping create(const char* name, std::size_t bytes);
  // Another process's mapping; std::system_error where it cannot be opened or is shorter than `bytes`.
  static Mapping attach(int pid, int fd, std::size_t bytes);

  void* data() const { return data_; }
  std::size_t size() const { return size_; }
  int fd() const { return fd_; }  // -1 where attached
  void reset();

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
  int fd_ = -1;
  int owner_ = -1;  // pid: a forked child has the object but not the mapping
};

// A number no other process guesses.
unsigned long long random_token();

}  // namespace dtcomm
