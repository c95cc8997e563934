#include "net/epoll_set.h"

#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "net/forked_children.h"

namespace dtcomm {
void EpollSet::add(int fd, int number) {
  if (fd_ < 0) {
    fd_ = epoll_create1(EPOLL_CLOEXEC);
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
    close_in_children(fd_);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u32 = static_cast<std::uint32_t>(number);
  if (epoll_ctl(fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
  watches_writable_.resize(std::max(watches_writable_.size(), static_cast<std::size_t>(number) + 1));
  watches_writable_[static_cast<std::size_t>(number)] = false;
}

void EpollSet::watch_writable(int fd, int number, bool wanted) {
  if (watches_writable_[static_cast<std::size_t>(number)] == wanted) return;
  watches_writable_[static_cast<std::size_t>(number)] = wanted;
  epoll_event event{};
  event.events = wanted ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u32 = static_cast<std::uint32_t>(number);
  epoll_ctl(fd_, EPOLL_CTL_MOD, fd, &event);
}

void EpollSet::remove(int fd) {
  epoll_event event{};
  epoll_ctl(fd_, EPOLL_CTL_DEL, fd, &event);
}

void EpollSet::close() {
  if (fd_ < 0) return;
  close_unless_in_child(fd_);
  fd_ = -1;
}

std::size_t EpollSet::ready(std::array<int, kMaxReady>& numbers) const {
  epoll_event events[kMaxReady];
  const int found = epoll_wait(fd_, events, static_cast<int>(kMaxReady), 0);
  const std::size_t count = found > 0 ? static_cast<std::size_t>(found) : 0;
  for (std::size_t i = 0; i < count; ++i) numbers[i] = static_cast<int>(events[i].data.u32);
  return count;
}

void sleep_until_readable(pollfd* fds, std::size_t count, std::uint64_t timeout_ns) {
  timespec timeout{static_cast<time_t>(timeout_ns / 1000000000ull), static_cast<long>(timeout_ns % 1000000000ull)};
  ppoll(fds, count, &timeout, nullptr);
}

}  // namespace dtcomm
