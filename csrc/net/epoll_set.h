// A set of sockets (epoll) that is itself one descriptor, readable while any of the sockets needs attention.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dtcomm {

class EpollSet {
 public:
  EpollSet() = default;
  ~EpollSet() { close(); }
  EpollSet(const EpollSet&) = delete;

  // Adds a socket under a number. Throws std::system_error if the kernel has no descriptor for the set.
  void add(int fd, int number);
  // Whether to report the socket also when it becomes writable.
  void watch_writable(int fd, int number, bool wanted);
  void remove(int fd);
  void close();

  int fd() const { return fd_; }  // -1 while the set is empty
  // Stores the numbers of sockets that are ready, and returns how many; does not block.
  static constexpr std::size_t kMaxReady = 64;
  std::size_t ready(std::array<int, kMaxReady>& numbers) const;

 private:
  int fd_ = -1;
  std::vector<bool> watches_writable_;  // by number
};

// Sleeps until one of the descriptors is in a state that it is polled for, or `timeout_ns` has passed.
void sleep_until_readable(pollfd* fds, std::size_t count, std::uint64_t timeout_ns);

}  // namespace dtcomm
