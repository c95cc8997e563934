// Many sockets as one descriptor, which is readable while any of them has something for its owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dtcomm {

class Watch {
 public:
  Watch() = default;
  ~Watch() { close(); }
  Watch(const Watch&) = delete;

  // From the first socket on there is a descriptor; std::system_error where the kernel has none to spare.
  void add(int fd, int number);
  // Also look out for room to send; or no more.
  void want_room(int fd, int number, bool wanted);
  void remove(int fd);
  void close();

  int fd() const { return fd_; }
  // The numbers of sockets that have something, up to `most` of them; nobody waits.
  std::size_t ready(int* numbers, std::size_t most) const;

 private:
  int fd_ = -1;
  std::vector<bool> wants_room_;  // by number
};

// Sleeps until one of the descriptors is readable or `timeout_ns` passed.
void sleep_on(const int* fds, std::size_t count, std::uint64_t timeout_ns);

}  // namespace dtcomm
